"""Checkpoints of verl and OpenRLHF are read as they lie on disk, and those written for them are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.cli.app import main
from nereus.emu.checkpoint.formats import open_folder
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.emu.checkpoint.torch_file import load
from nereus.emu.decoder import EMBED, HEAD, DecoderConfig, decoder_spec
from nereus.emu.hf_folder import HFSource, write_hf_folder
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import whole
from nereus.errors import CheckpointError
from nereus.integrations.checkpoints import write_openrlhf, write_verl
from tests.emu.fsdp_processes import load_as_verl, save_as_openrlhf, save_as_verl
from tests.emu.processes import Workers
from tests.emu.test_checkpoint import Numbers

# Odd numbers of rows: two ranks hold unequal parts.
CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=37,
    hidden_size=12,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    intermediate_size=21,
    qkv_bias=True,
    tied=True,
    max_positions=64,
)
UNTIED = replace(CONFIG, tied=False)
STATE = {"theta": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    """Two processes."""
    workers = Workers(range(2))
    yield workers
    workers.close()


def folder_of(config: DecoderConfig, folder: Path) -> Path:
    """A model folder with weights of its own, for transformers."""
    plain = replace(config, head="lm")
    spec = decoder_spec(plain)
    write_hf_folder(Numbers(spec, {"theta": torch.float32}), plain, folder)
    return folder


def assert_same(source: LogicalSource, state: dict[str, Any], names: list[str]) -> None:
    """Every kind and tensor is that of the trainer, whole and in two halves of its rows."""
    assert set(source.kinds()) >= set(state)
    for kind, named in state.items():
        for name in names:
            want = torch.from_numpy(named[name])
            full = whole(tuple(want.shape))
            middle = want.shape[0] // 2
            halves = [
                source.read(kind, name, ((lo, hi), *full[1:]))
                for lo, hi in ((0, middle), (middle, want.shape[0]))
            ]
            assert torch.equal(source.read(kind, name, full).float(), want), f"{kind} {name}"
            assert torch.equal(torch.cat(halves).float(), want), f"halves of {kind} {name}"


@pytest.mark.parametrize(
    ("config", "model"),
    [(CONFIG, "actor"), (UNTIED.with_head("value"), "critic")],
    ids=["tied", "critic"],
)
def test_shards_of_verl_are_read_with_their_moments(
    pair: Workers, tmp_path: Path, config: DecoderConfig, model: str
) -> None:
    run = tmp_path / "run"
    shards = run / "global_step_2" / model
    (shards / "huggingface").mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    start = folder_of(config, tmp_path / "model")
    (shards / "huggingface" / "config.json").write_text((start / "config.json").read_text())
    arguments = (str(tmp_path / "store"), str(shards), str(start), config.head)
    state = pair.run(save_as_verl, *arguments)[0]
    for given in (run, run / "global_step_2", shards):
        opened = open_folder(given, model=model, head=config.head)
        assert (opened.format, opened.folder, opened.adam_steps) == ("fsdp", shards, 2)
    assert opened.source.kinds() == ("theta", "exp_avg", "exp_avg_sq")
    assert_same(opened.source, state, list(opened.spec.by_name))


@pytest.mark.parametrize("config", [CONFIG, UNTIED.with_head("value")], ids=["tied", "critic"])
def test_verl_loads_what_was_written_for_it(pair: Workers, tmp_path: Path, config: DecoderConfig) -> None:
    spec = decoder_spec(config)
    source = Numbers(spec, STATE)
    start = folder_of(config, tmp_path / "model")
    root = tmp_path / "run"
    folder = write_verl(source, config, root, step=7, world_size=2, adam_steps=3, device="cpu")
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "7"
    loaded = pair.run(load_as_verl, str(tmp_path / "store"), str(folder), str(start), config.head)[0]
    for (kind, name), tensor in source.tensors.items():
        assert torch.equal(torch.from_numpy(loaded[kind][name]), tensor), f"{kind} {name}"
    again = open_folder(root, head=config.head)
    assert again.adam_steps == 3
    assert_same(again.source, loaded, list(spec.by_name))
    if config.head == "lm":
        beside = HFSource(folder / "huggingface")
        assert torch.equal(beside.read("theta", EMBED, whole((37, 12))), source.tensors["theta", EMBED])


class Evil:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, protocol: int) -> None:
    shards = tmp_path / "actor"
    shards.mkdir()
    state = {EMBED: torch.zeros(37, 12), "evil": Evil(tmp_path / "run by the file")}
    torch.save(state, shards / "model_world_size_1_rank_0.pt", pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"model_world_size_1_rank_0\.pt"):
        open_folder(shards, config=CONFIG)
    with pytest.raises(CheckpointError, match=r"mkdir|Unsupported"):
        load(shards / "model_world_size_1_rank_0.pt", inert=("deepspeed",))
    assert not (tmp_path / "run by the file").exists()


def test_what_is_absent_or_misshapen_is_named(tmp_path: Path) -> None:
    folder = write_verl(
        Numbers(decoder_spec(CONFIG), STATE), CONFIG, tmp_path, step=1, world_size=2, device="cpu"
    )
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[37, 12\], not \[41, 12\]"):
        open_folder(folder, config=replace(CONFIG, vocab_size=41))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2"):
        open_folder(folder, config=replace(CONFIG, num_layers=3))
    (folder / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"rank_1\.pt absent"):
        open_folder(folder)


def test_flat_moments_of_fsdp1_are_no_silent_loss(tmp_path: Path) -> None:
    source = Numbers(decoder_spec(CONFIG), STATE)
    folder = write_verl(source, CONFIG, tmp_path, step=1, world_size=1, device="cpu")
    flat = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(99), "exp_avg_sq": torch.zeros(99)}
    torch.save({"state": {0: flat}, "param_groups": []}, folder / "optim_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="fsdp2"):
        open_folder(folder)
    assert open_folder(folder, weights_only=True).source.kinds() == ("theta",)


def zero_files(folder: Path, source: Numbers, stage: int) -> None:
    """What two ranks of DeepSpeed write, by the definition of its formats: two groups of parameters."""
    shapes = {name: torch.Size(shape) for name, shape in source.shapes().items()}
    groups = [
        {n: s for n, s in shapes.items() if len(s) > 1},
        {n: s for n, s in shapes.items() if len(s) < 2},
    ]
    folder.mkdir(parents=True)
    common = {"param_shapes": groups, "global_steps": 5, "dp_world_size": 2}
    module = {name: source.tensors["theta", name].bfloat16() for name in shapes}
    if stage < 3:
        torch.save({**common, "module": module}, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        flats = {kind: [_part(source, kind, group, rank, stage) for group in groups] for kind in STATE}
        masters = flats.pop("theta")
        inner = {"state": {at: {kind: flats[kind][at] for kind in flats} for at in range(2)}}
        held = {"fp32_flat_groups": masters, "optimizer_state_dict": inner}
        if stage < 3:
            held = {"single_partition_of_fp32_groups": masters, "base_optimizer_state": inner}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": held}, folder / (name if stage == 3 else f"bf16_{name}"))
        if stage == 3:
            torch.save({**common, "module": None}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def _part(source: Numbers, kind: str, group: dict[str, torch.Size], rank: int, stage: int) -> torch.Tensor:
    tensors = [source.tensors[kind, name].flatten() for name in group]
    if stage == 3:
        return torch.cat([_half(tensor, rank) for tensor in tensors])
    return _half(torch.cat(tensors), rank)


def _half(flat: torch.Tensor, rank: int) -> torch.Tensor:
    size = -(-len(flat) // 2)
    return torch.nn.functional.pad(flat, (0, 2 * size - len(flat)))[rank * size : (rank + 1) * size]


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_checkpoints_are_read_by_the_definition_of_their_files(tmp_path: Path, stage: int) -> None:
    config = replace(CONFIG, dtype="bf16")
    source = Numbers(decoder_spec(config), STATE)
    actor = tmp_path / "ckpt" / "_actor"
    zero_files(actor / "global_step5", source, stage)
    (actor / "latest").write_text("global_step5")
    with pytest.raises(CheckpointError, match=r"config\.json is needed"):
        open_folder(tmp_path / "ckpt")
    opened = open_folder(tmp_path / "ckpt", config=config)
    assert (opened.format, opened.folder, opened.adam_steps) == ("zero", actor / "global_step5", 5)
    for (kind, name), tensor in source.tensors.items():
        full = whole(tuple(tensor.shape))
        if kind == "theta":
            assert torch.equal(opened.source.read("theta", name, full), tensor.bfloat16())
        held = "master" if kind == "theta" else kind
        assert torch.equal(opened.source.read(held, name, full), tensor), f"{held} {name}"
    prefix = "" if stage == 3 else "bf16_"
    (actor / "global_step5" / f"{prefix}zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="1 optimizer files"):
        open_folder(tmp_path / "ckpt", config=config)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_checkpoints_of_deepspeed_give_its_own_numbers(
    pair: Workers, tmp_path: Path, stage: int
) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    start = folder_of(UNTIED, tmp_path / "model")
    actor = tmp_path / "ckpt" / "_actor"
    pair.run(save_as_openrlhf, str(tmp_path / "store"), str(actor), str(start), stage, timeout_s=240.0)
    opened = open_folder(tmp_path / "ckpt", config=replace(UNTIED, dtype="bf16"))
    assert (opened.format, opened.adam_steps) == ("zero", 2)
    held = get_fp32_state_dict_from_zero_checkpoint(actor)
    weights = {name: tensor.detach().float() for name, tensor in held.items()}
    state = {
        "master": {name: tensor.numpy() for name, tensor in weights.items()},
        "exp_avg": {name: (2 * tensor).numpy() for name, tensor in weights.items()},
        "exp_avg_sq": {name: tensor.square().numpy() for name, tensor in weights.items()},
    }
    assert_same(opened.source, state, list(opened.spec.by_name))
    for name, tensor in weights.items():
        assert torch.equal(opened.source.read("theta", name, whole(tuple(tensor.shape))), tensor.bfloat16())


def nereus(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_a_run_of_verl_becomes_a_checkpoint_of_ours_and_goes_back(tmp_path: Path) -> None:
    source = Numbers(decoder_spec(CONFIG), STATE)
    write_verl(source, CONFIG, tmp_path / "verl", step=9, world_size=2, adam_steps=9, device="cpu")
    assert nereus("reshard", tmp_path / "verl", tmp_path / "ours", "--to", "tp=3,pp=2") == 0
    ours = open_checkpoint(tmp_path / "ours" / "step-000000")
    assert ours.control.optimizers["actor"].adam_steps == 9
    model = folder_of(CONFIG, tmp_path / "model")
    back = ("export", tmp_path / "ours", tmp_path / "back", "--for", "verl", "--ranks", 3, "--model", model)
    assert nereus(*back, "--step", 9) == 0
    again = open_folder(tmp_path / "back")
    assert again.adam_steps == 9
    for (kind, name), tensor in source.tensors.items():
        assert torch.equal(again.source.read(kind, name, whole(tuple(tensor.shape))), tensor)


def test_a_model_for_openrlhf_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    source = Numbers(decoder_spec(UNTIED), STATE)
    folder = write_openrlhf(source, UNTIED, tmp_path, step=4)
    assert folder == tmp_path / "global_step4_hf"
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(loaded[HEAD], source.tensors["theta", HEAD])
    assert nereus("export", folder, tmp_path / "plain", "--for", "transformers") == 0
    assert nereus("export", folder, tmp_path / "verl", "--for", "verl") == 2
