"""What is written for OpenRLHF is what DeepSpeed loads and trains on from, at every stage of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TrainBatch
from nereus.emu.checkpoint.formats import open_folder
from nereus.emu.decoder import HEAD, DecoderConfig, decoder_spec
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.layout import Layout
from nereus.emu.source import fill
from nereus.emu.tensor import whole
from nereus.emu.unit_groups import UnitGroups
from nereus.errors import CheckpointError
from nereus.integrations.checkpoints import write_openrlhf_state, write_verl
from nereus.integrations.zero_files import Flat, Shapes, ZeroCut, flats
from tests.emu.engines.torch_cases import QWEN3_MOE, TokenLoss, assemble, boxes, make_batch
from tests.emu.processes import Workers
from tests.emu.test_checkpoint import Numbers
from tests.integrations.openrlhf_processes import Job, resume
from tests.integrations.test_checkpoints import CONFIG, STATE, UNTIED, nereus

ADAM = AdamW(betas=(0.8, 0.9), eps=1e-5, weight_decay=0.0, max_gradient_norm=0.5)
HALF = {
    "theta": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
RATE = 1e-2


class Trained(Numbers):
    """Numbers that an optimizer can go on from: small weights, second moments above zero."""

    def __init__(self, config: DecoderConfig, dtypes: dict[str, torch.dtype]) -> None:
        super().__init__(decoder_spec(config), dtypes)
        for (kind, name), tensor in self.tensors.items():
            if kind == "exp_avg_sq":
                self.tensors[kind, name] = 1e-2 + tensor.square()
            elif "norm" not in name:
                self.tensors[kind, name] = 0.2 * tensor
        if "master" in dtypes:
            for name in self.shapes():
                self.tensors["theta", name] = self.tensors["master", name].to(dtypes["theta"])


def written(source: Numbers, config: DecoderConfig, root: Path, cut: ZeroCut, **options: Any) -> Path:
    return write_openrlhf_state(
        source, config, root, step=4, cut=cut, adam_steps=9, learning_rate=RATE, settings=ADAM, **options
    )


def assert_read_back(root: Path, config: DecoderConfig, source: Numbers, model: str = "actor") -> None:
    """The files hold the source's numbers, fp32 weights among them."""
    opened = open_folder(root, config=config, model=model, head=config.head)
    assert (opened.format, opened.adam_steps) == ("zero", 9)
    for (kind, name), tensor in source.tensors.items():
        found = opened.source.read(kind, name, whole(tuple(tensor.shape)))
        assert torch.equal(found, tensor), f"{kind} {name}"


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("config", [CONFIG, replace(UNTIED, dtype="bf16")], ids=["tied", "half"])
def test_files_for_any_number_of_ranks_hold_every_number(
    tmp_path: Path, config: DecoderConfig, ranks: int
) -> None:
    source = Trained(config, STATE if config.dtype == "fp32" else HALF)
    written(source, config, tmp_path, ZeroCut(ranks=ranks))
    assert len(list((tmp_path / "_actor" / "global_step4").glob("*_optim_states.pt"))) == ranks
    assert_read_back(tmp_path, config, source)


def _filled(part: Flat, numbers: dict[str, Tensor]) -> Tensor:
    flat = torch.zeros(part.size)
    for slot in part.slots:
        flat[slot.at : slot.at + slot.hi - slot.lo] = numbers[slot.name].flatten()[slot.lo : slot.hi]
    return flat


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_stage_3_cuts_every_parameter_and_ends_a_sub_group_with_the_one_that_fills_it(ranks: int) -> None:
    shapes: Shapes = {"a": (5, 3), "b": (2,), "c": (4, 4), "d": (1,)}
    numbers = {name: torch.arange(1.0, 1 + prod(shape)) for name, shape in shapes.items()}
    sizes = {name: -(-prod(shape) // ranks) for name, shape in shapes.items()}
    # The first sub-group is full with b, the second with c.
    cut = ZeroCut(ranks=ranks, stage=3, sub_group_size=sizes["a"] + 1)
    held = [flats([shapes], cut, rank) for rank in range(ranks)]
    expected = [["a", "b"], ["c", "d"]] if sizes["c"] < cut.sub_group_size else [["a", "b"], ["c"], ["d"]]
    for number, names in enumerate(expected):
        assert {part[number].size for part in held} == {sum(sizes[name] for name in names)}
        at = 0
        for name in names:
            parts = [_filled(part[number], numbers)[at : at + sizes[name]] for part in held]
            assert torch.equal(torch.cat(parts)[: numbers[name].numel()], numbers[name])
            assert not torch.cat(parts)[numbers[name].numel() :].any()
            at += sizes[name]


def test_the_command_writes_what_openrlhf_resumes_from(tmp_path: Path) -> None:
    source = Trained(CONFIG, STATE)
    write_verl(source, CONFIG, tmp_path / "verl", step=9, world_size=2, adam_steps=9, device="cpu")
    out = tmp_path / "out"
    command = ("export", tmp_path / "verl", out, "--for", "openrlhf", "--step", 4)
    assert nereus(*command) == 2, "a number of ranks is needed"
    assert not out.exists()
    assert nereus(*command, "--ranks", 3, "--optimizer", "beta3=1") == 2
    assert nereus(*command, "--ranks", 3, "--optimizer", "beta2=0.9", "--optimizer", "eps=1e-6") == 0
    assert (out / "_actor" / "latest").read_text() == "global_step4"
    assert (out / "global_step4_hf" / "config.json").is_file()
    assert_read_back(out, CONFIG, source)
    files = out / "_actor" / "global_step4"
    held = torch.load(files / "zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=True)
    (group, _) = held["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    assert (group["betas"], group["eps"], group["lr"]) == ((0.9, 0.9), 1e-6, 1e-6)
    states = torch.load(files / "mp_rank_00_model_states.pt", weights_only=True)
    assert (states["global_step"], states["episode"], states["data_loader_state_dict"]) == (4, 0, {})
    assert states["shared_params"] == {HEAD: "model.embed_tokens.weight"}
    only = tmp_path / "only"
    assert nereus("export", tmp_path / "verl", only, "--for", "openrlhf", "--step", 4, "--weights-only") == 0
    assert [child.name for child in only.iterdir()] == ["global_step4_hf"]


def test_what_openrlhf_could_not_resume_from_is_refused(tmp_path: Path) -> None:
    cut = ZeroCut(ranks=1)
    source = Trained(CONFIG, STATE)
    with pytest.raises(CheckpointError, match="--step"):
        write_openrlhf_state(
            source, CONFIG, tmp_path, step=0, cut=cut, adam_steps=0, learning_rate=RATE, settings=ADAM
        )
    plain = Numbers(decoder_spec(CONFIG), {"theta": torch.float32})
    with pytest.raises(CheckpointError, match="no moments"):
        written(plain, CONFIG, tmp_path, cut)
    experts = Numbers(decoder_spec(QWEN3_MOE), STATE)
    with pytest.raises(CheckpointError, match="a mixture of experts"):
        written(experts, QWEN3_MOE, tmp_path, cut)
    with pytest.raises(CheckpointError, match="a mixture of experts"):
        write_verl(experts, QWEN3_MOE, tmp_path, step=1, world_size=1)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    """Two processes."""
    workers = Workers(range(2))
    yield workers
    workers.close()


def one_step_of_ours(
    source: Numbers, config: DecoderConfig, batch: TrainBatch
) -> dict[str, dict[str, Tensor]]:
    """The torch engine's state after one step from the source's."""
    layout = Layout.make(decoder_spec(config), tp=1, pp=1, ranks=(0,))
    engine = TorchEngine(config, layout, UnitGroups.alone(layout), optimizer=ADAM)
    fill(engine.state, source, {kind: kind for kind in STATE})
    engine.step_count = 9
    engine.train_step([batch], TokenLoss(), GlobalCounts.from_mask(batch.mask_bt), learning_rate=RATE)
    return {kind: assemble(config, [boxes(engine.state[kind])]) for kind in STATE}


@pytest.mark.deepspeed
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_every_bit_and_makes_the_step_that_we_make(
    pair: Workers, tmp_path: Path, stage: Any, config: DecoderConfig
) -> None:
    source = Trained(config, STATE)
    start = tmp_path / "model"
    write_hf_folder(source, config, start)
    cut = ZeroCut(ranks=2, stage=stage, sub_group_size=300)
    written(source, config, tmp_path / "ckpt", cut, epoch=1, prompts=64)
    job = Job(
        model=str(start), stage=stage, learning_rate=3e-3, settings=ADAM, sub_group_size=cut.sub_group_size
    )
    batch = make_batch(8, vocab_size=config.vocab_size)
    arguments = (str(tmp_path / "store"), str(tmp_path / "ckpt" / "_actor"), job, batch)
    found = pair.run(resume, *arguments, timeout_s=240.0)[0]
    for (kind, name), tensor in source.tensors.items():
        held = "master" if kind == "theta" else kind
        assert np.array_equal(found["loaded"][held][name], tensor.numpy()), f"{held} {name}"
        if kind == "theta":
            assert np.array_equal(found["loaded"]["theta"][name], tensor.numpy()), name
    assert (found["steps"], found["epoch"]) == (9, 9)
    client = found["client"]
    assert (client["global_step"], client["episode"], client["total_consumed_prompts"]) == (4, 1, 64)
    assert [(g["lr"], tuple(g["betas"]), g["eps"]) for g in found["groups"]] == [(RATE, (0.8, 0.9), 1e-5)] * 2
    ours = one_step_of_ours(source, config, batch)
    for kind, named in ours.items():
        held = "master" if kind == "theta" else kind
        for name, after in named.items():
            # Other kernels and another order of sums; a step moves weights by up to 1e-2.
            np.testing.assert_allclose(
                found["stepped"][held][name], after.numpy(), atol=2e-6, err_msg=f"{held} {name}"
            )
    # The job's own schedule goes on: cosine from its rate, ten of a hundred steps done.
    share = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 0.1))
    assert found["next_rate"] == pytest.approx(3e-3 * share, rel=1e-6)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_loads_half_precision_and_a_critic(pair: Workers, tmp_path: Path, stage: Any) -> None:
    config = replace(UNTIED, dtype="bf16").with_head("value")
    source = Trained(config, HALF)
    start = tmp_path / "model"
    write_hf_folder(source, config, start)
    settings = replace(ADAM, weight_decay=0.1)
    write_openrlhf_state(
        source,
        config,
        tmp_path / "ckpt",
        step=4,
        cut=ZeroCut(ranks=2, stage=stage),
        adam_steps=9,
        learning_rate=RATE,
        settings=settings,
        model="critic",
    )
    job = Job(
        model=str(start), stage=stage, learning_rate=3e-3, settings=settings, dtype="bf16", head="value"
    )
    arguments = (str(tmp_path / "store"), str(tmp_path / "ckpt" / "_critic"), job, None)
    found = pair.run(resume, *arguments, timeout_s=240.0)[0]
    for (kind, name), tensor in source.tensors.items():
        assert np.array_equal(found["loaded"][kind][name], tensor.float().numpy()), f"{kind} {name}"
    assert [group["weight_decay"] for group in found["groups"]] == [0.1, 0.0]
    assert "global_step" not in found["client"]
