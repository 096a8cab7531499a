"""Other programs' checkpoints as sources, and their conversion into ours."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.emu.checkpoint.convert import Conversion, convert
from nereus.emu.checkpoint.dcp_reader import DcpReader
from nereus.emu.checkpoint.dcp_source import DcpSource
from nereus.emu.checkpoint.formats import Opened, control_for, open_folder
from nereus.emu.checkpoint.megatron_source import MegatronSource
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.emu.decoder import EMBED, FINAL_NORM, HEAD, DecoderConfig, decoder_spec
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.layout import Layout
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import ModelSpec, whole
from nereus.errors import CheckpointError
from tests.emu.processes import Workers
from tests.emu.test_checkpoint import Numbers

CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=37,
    hidden_size=12,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    intermediate_size=22,
    qkv_bias=True,
    dtype="bf16",
)
SPEC = decoder_spec(CONFIG)
FULL = {
    "theta": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
WEIGHTS = {"theta": torch.float32}


def same(source: LogicalSource, numbers: Numbers, spec: ModelSpec, kinds: tuple[str, ...]) -> bool:
    """Whether every tensor, read whole and in two halves of its rows, is the definition's bit for bit."""
    for kind in kinds:
        for name, tensor in spec.by_name.items():
            want, rows = numbers.tensors[kind, name], tensor.shape[0]
            middle = rows // 2 + rows % 2
            halves = [
                source.read(kind, name, ((lo, hi), *whole(tensor.shape)[1:]))
                for lo, hi in ((0, middle), (middle, rows))
            ]
            if not torch.equal(source.read(kind, name, whole(tensor.shape)), want):
                return False
            if not torch.equal(torch.cat(halves), want):
                return False
    return True


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def dcp_state(numbers: Numbers, *, steps: int | None = 5) -> dict[str, Any]:
    """What get_model_state_dict and get_optimizer_state_dict give."""
    optimizer: dict[str, Any] = {}
    for name in SPEC.by_name:
        optimizer[name] = {kind: numbers.tensors[kind, name] for kind in ("exp_avg", "exp_avg_sq")}
        if steps is not None:
            optimizer[name]["step"] = torch.tensor(float(steps))
    model = {name: numbers.tensors["theta", name] for name in SPEC.by_name}
    return {"model": model, "optim": {"state": optimizer, "param_groups": [{"lr": 1e-3}]}}


def test_dcp_folder_gives_weights_moments_and_steps(tmp_path: Path) -> None:
    numbers = Numbers(SPEC, FULL)
    source = DcpSource(save_dcp(dcp_state(numbers), tmp_path / "dcp"), SPEC)
    assert source.kinds() == ("theta", "exp_avg", "exp_avg_sq")
    assert source.adam_steps() == 5
    assert same(source, numbers, SPEC, source.kinds())


def test_dcp_names_are_found_under_any_prefix(tmp_path: Path) -> None:
    numbers = Numbers(SPEC, WEIGHTS)
    state = {f"app.module.{name}": numbers.tensors["theta", name] for name in SPEC.by_name}
    source = DcpSource(save_dcp(state, tmp_path / "dcp"), SPEC)
    assert source.kinds() == ("theta",)
    assert same(source, numbers, SPEC, ("theta",))


def save_sharded(worker: int, folder: str, store: str) -> None:
    """Every tensor cut over two ranks, by its first dimension or its last in turn."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        numbers = Numbers(SPEC, WEIGHTS)
        state = {}
        for index, (name, tensor) in enumerate(SPEC.by_name.items()):
            dim = index % 2 * (len(tensor.shape) - 1)
            parts = numbers.tensors["theta", name].tensor_split(2, dim=dim)
            full = numbers.tensors["theta", name]
            state[name] = DTensor.from_local(
                parts[worker].contiguous(),
                mesh,
                [Shard(dim)],
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
        save(state, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def test_dcp_chunks_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    workers = Workers((0, 1))
    try:
        workers.run(save_sharded, str(tmp_path / "dcp"), str(tmp_path / "store"))
    finally:
        workers.close()
    source = DcpSource(tmp_path / "dcp", SPEC)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert same(source, Numbers(SPEC, WEIGHTS), SPEC, ("theta",))


def test_dcp_of_another_model_is_refused_with_names(tmp_path: Path) -> None:
    folder = save_dcp(dcp_state(Numbers(SPEC, FULL)), tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"missing: model.layers.3"):
        DcpSource(folder, decoder_spec(replace(CONFIG, num_layers=4)))
    with pytest.raises(CheckpointError, match=r"misshapen: model.model.embed_tokens.weight is \[37, 12\]"):
        DcpSource(folder, decoder_spec(replace(CONFIG, vocab_size=38)))


def test_missing_chunk_file_is_named(tmp_path: Path) -> None:
    folder = save_dcp(dcp_state(Numbers(SPEC, FULL)), tmp_path / "dcp")
    source = DcpSource(folder, SPEC)
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match="every chunk's file must be there"):
        source.read("theta", FINAL_NORM, ((0, 12),))


def test_unfinished_dcp_is_refused(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(CheckpointError, match="no finished distributed checkpoint"):
        DcpReader(tmp_path)


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows by key-value group, the way Megatron's own converters write it down."""
    groups, rest = CONFIG.num_kv_heads, q.shape[1:]
    parts = [each.reshape(groups, -1, CONFIG.head_dim, *rest) for each in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def megatron_state(numbers: Numbers, *, stacked: bool, moments: tuple[str, ...] = ()) -> dict[str, Any]:
    out: dict[str, Any] = {}
    names = {"theta": "", "master": "optimizer.state.fp32_param."}
    for kind in ("theta", *moments):
        head = names.get(kind, f"optimizer.state.{kind}.")

        def get(name: str, kind: str = kind) -> torch.Tensor:
            return numbers.tensors[kind, name]

        pad = torch.zeros(3, CONFIG.hidden_size, dtype=get(EMBED).dtype)
        out[head + "embedding.word_embeddings.weight"] = torch.cat([get(EMBED), pad])
        out[head + "output_layer.weight"] = torch.cat([get(HEAD), pad])
        out[head + "decoder.final_layernorm.weight"] = get(FINAL_NORM)
        layers = []
        for layer in range(CONFIG.num_layers):
            at = f"model.layers.{layer}."
            qkv = {
                kind: fuse_qkv(*(get(f"{at}self_attn.{letter}_proj.{kind}") for letter in "qkv"))
                for kind in ("weight", "bias")
            }
            layers.append(
                {
                    "self_attention.linear_qkv.layer_norm_weight": get(at + "input_layernorm.weight"),
                    "self_attention.linear_qkv.weight": qkv["weight"],
                    "self_attention.linear_qkv.bias": qkv["bias"],
                    "self_attention.linear_proj.weight": get(at + "self_attn.o_proj.weight"),
                    "mlp.linear_fc1.layer_norm_weight": get(at + "post_attention_layernorm.weight"),
                    "mlp.linear_fc1.weight": torch.cat(
                        [get(at + "mlp.gate_proj.weight"), get(at + "mlp.up_proj.weight")]
                    ),
                    "mlp.linear_fc2.weight": get(at + "mlp.down_proj.weight"),
                }
            )
        for inner in layers[0]:
            if stacked:
                out[f"{head}decoder.layers.{inner}"] = torch.stack([layer[inner] for layer in layers])
            else:
                out |= {f"{head}decoder.layers.{i}.{inner}": layer[inner] for i, layer in enumerate(layers)}
    return out


@pytest.mark.parametrize("stacked", [True, False])
def test_megatron_layers_stacked_or_not_are_unfused_and_unpadded(tmp_path: Path, stacked: bool) -> None:
    numbers = Numbers(SPEC, FULL)
    state = megatron_state(numbers, stacked=stacked, moments=("master", "exp_avg", "exp_avg_sq"))
    folder = save_dcp(state, tmp_path / "iter_0000012")
    torch.save({"optimizer": {"state": {"common_step": torch.tensor(12.0)}}}, folder / "common.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    opened = open_folder(tmp_path, config=CONFIG)
    assert opened.format == "megatron"
    assert opened.adam_steps == 12
    assert set(opened.source.kinds()) == set(FULL)
    assert same(opened.source, numbers, SPEC, tuple(FULL))


def test_megatron_rows_of_any_box_are_the_logical_ones(tmp_path: Path) -> None:
    numbers = Numbers(SPEC, WEIGHTS)
    source = MegatronSource(save_dcp(megatron_state(numbers, stacked=True), tmp_path / "m"), CONFIG)
    for letter in "qkv":
        name = f"model.layers.1.self_attn.{letter}_proj.weight"
        full = numbers.tensors["theta", name]
        for lo in range(full.shape[0]):
            for hi in range(lo, full.shape[0] + 1):
                assert torch.equal(source.read("theta", name, ((lo, hi), (3, 7))), full[lo:hi, 3:7])


def test_megatron_of_another_model_is_refused_with_names(tmp_path: Path) -> None:
    folder = save_dcp(megatron_state(Numbers(SPEC, WEIGHTS), stacked=True), tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight is \[3, 44, 12\], not \[3, 48, 12\]"):
        MegatronSource(folder, replace(CONFIG, intermediate_size=24))
    with pytest.raises(CheckpointError, match="is absent"):
        MegatronSource(folder, replace(CONFIG, qk_norm=True))


def test_optimizer_state_that_cannot_be_read_is_no_silent_loss(tmp_path: Path) -> None:
    state = megatron_state(Numbers(SPEC, WEIGHTS), stacked=True)
    state["optimizer.distributed.dp_group_idx_0.gbuf_idx_0"] = torch.zeros(10)
    folder = save_dcp(state, tmp_path / "m")
    with pytest.raises(
        CheckpointError, match=r"1 stored parts such as optimizer.distributed.*--weights-only"
    ):
        open_folder(folder, config=CONFIG)
    assert open_folder(folder, config=CONFIG, weights_only=True).source.kinds() == ("theta",)


@pytest.mark.megatron
def test_a_checkpoint_of_megatron_core_gives_its_logits_in_transformers(tmp_path: Path) -> None:
    """A GPT saved by Megatron at tp 2 and exported: equal logits within fp32 summation order."""
    pytest.importorskip("megatron.core", reason="needs the megatron extra")
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "megatron"
    folder.mkdir()
    program = Path(__file__).with_name("megatron_save.py")
    running = [
        subprocess.Popen([sys.executable, str(program), str(rank), "2", str(folder), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [process.wait(timeout=240) for process in running] == [0, 0]
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        intermediate_size=48,
    )
    opened = open_folder(folder, config=config)
    assert opened.format == "megatron"
    write_hf_folder(opened.source, config, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(12).view(1, 12)).logits
    want = torch.load(folder / "logits.pt")
    assert want.abs().max() > 0.1
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-6)


def converted(opened: Opened, root: Path, *, tp: int, pp: int, **options: Any) -> Path:
    layout = Layout.make(opened.spec, tp=tp, pp=pp, ranks=tuple(range(tp * pp)))
    conversion = Conversion.of(opened.source, opened.spec, layout, model="actor", **options)
    seen: list[int] = []
    control = control_for(opened, conversion, None)
    path = convert(opened.source, conversion, root, control, on_bytes=seen.append)
    assert sum(seen) == conversion.total_bytes
    assert len(list((path / "actor").glob("part-*.safetensors"))) == tp * pp
    return path


def test_every_format_becomes_our_checkpoint_and_that_another(tmp_path: Path) -> None:
    numbers = Numbers(SPEC, FULL)
    save_dcp(
        megatron_state(numbers, stacked=True, moments=("master", "exp_avg", "exp_avg_sq")), tmp_path / "m"
    )
    torch.save({"optimizer": {"param_groups": [{"step": 9}]}}, tmp_path / "m" / "common.pt")
    save_dcp(dcp_state(numbers), tmp_path / "d")
    write_hf_folder(numbers, CONFIG, tmp_path / "h")
    for name, steps in (("m", 9), ("d", 5), ("h", None)):
        opened = open_folder(tmp_path / name, config=CONFIG)
        first = converted(opened, tmp_path / f"{name}-first", tp=2, pp=3)
        again = open_folder(tmp_path / f"{name}-first", config=CONFIG)
        assert again.format == "nereus"
        assert again.folder == first
        second = converted(again, tmp_path / f"{name}-second", tp=3, pp=1)
        result = open_checkpoint(second)
        source = result.source("actor")
        assert source.kinds() == opened.source.kinds()
        assert same(source, numbers, SPEC, source.kinds())
        record = result.control.optimizers.get("actor")
        assert (record.adam_steps if record else None) == steps


def test_control_record_of_our_own_checkpoint_is_kept(tmp_path: Path) -> None:
    numbers = Numbers(SPEC, FULL)
    opened = open_folder(save_dcp(dcp_state(numbers), tmp_path / "d"), config=CONFIG)
    control = Control(
        step=40,
        policy_version=40,
        epoch=2,
        position=17,
        seed=3,
        config_digest="ab",
        optimizers={"actor": OptimizerRecord(adam_steps=80, learning_rate=2e-6)},
        counters={"rollouts": 5},
    )
    layout = Layout.make(SPEC, tp=1, pp=1, ranks=(0,))
    convert(opened.source, Conversion.of(opened.source, SPEC, layout, model="actor"), tmp_path / "a", control)
    path = converted(open_folder(tmp_path / "a", config=CONFIG), tmp_path / "b", tp=2, pp=1)
    assert path.name == "step-000040"
    assert open_checkpoint(path).control == control


def test_weights_may_be_cast_and_taken_alone(tmp_path: Path) -> None:
    numbers = Numbers(SPEC, FULL)
    opened = open_folder(save_dcp(dcp_state(numbers), tmp_path / "d"), config=CONFIG)
    path = converted(opened, tmp_path / "o", tp=2, pp=1, theta="fp32", weights_only=True)
    source = open_checkpoint(path).source("actor")
    assert source.kinds() == ("theta",)
    found = source.read("theta", EMBED, whole(SPEC.by_name[EMBED].shape))
    assert torch.equal(found, numbers.tensors["theta", EMBED].float())
    assert open_checkpoint(path).control.optimizers == {}


def test_moments_without_a_step_count_are_refused(tmp_path: Path) -> None:
    state = dcp_state(Numbers(SPEC, FULL), steps=None)
    opened = open_folder(save_dcp(state, tmp_path / "d"), config=CONFIG)
    layout = Layout.make(SPEC, tp=1, pp=1, ranks=(0,))
    conversion = Conversion.of(opened.source, SPEC, layout, model="actor")
    with pytest.raises(CheckpointError, match=r"bias correction .*--adam-steps"):
        control_for(opened, conversion, None)
    assert control_for(opened, conversion, 6).optimizers["actor"].adam_steps == 6


def test_unknown_folder_and_missing_config_are_explained(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"cannot tell what .* is: it holds notes.txt; known are"):
        open_folder(tmp_path)
    with pytest.raises(CheckpointError, match="absent or empty"):
        open_folder(tmp_path / "nowhere")
    folder = save_dcp(dcp_state(Numbers(SPEC, FULL)), tmp_path / "d")
    with pytest.raises(CheckpointError, match=r"config.json is needed"):
        open_folder(folder)
