"""Checkpoints: bits survive any change of layout; nothing half-written or damaged is ever picked."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.arena import ShardState, training_kinds
from nereus.emu.checkpoint.commit import abandon, begin, commit
from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.emu.checkpoint.folder import committed, damage, latest
from nereus.emu.checkpoint.ownership import owned_pieces, uncovered
from nereus.emu.checkpoint.part import Part, write_part
from nereus.emu.checkpoint.source import CheckpointSource, kinds_to_fill, open_checkpoint
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.layout import Layout, shard
from nereus.emu.source import fill
from nereus.emu.tensor import Box, ModelSpec, box_size, whole
from nereus.errors import CheckpointError, InvalidLayout

CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=37,
    hidden_size=12,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    intermediate_size=22,
    tied=True,
    qkv_bias=True,
)
CONTROL = Control(
    step=12,
    policy_version=12,
    epoch=1,
    position=96,
    seed=7,
    config_digest="ab12",
    optimizers={"actor": OptimizerRecord(adam_steps=12, learning_rate=0.1 + 0.2)},
    counters={"rollouts": 768},
    scalars={"kl_coefficient": 1 / 3},
)


class Numbers:
    """A source of known numbers: logical tensors drawn once per kind."""

    def __init__(self, spec: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            (kind, name): torch.randn(tensor.shape, generator=generator).to(dtype)
            for kind, dtype in dtypes.items()
            for name, tensor in spec.by_name.items()
        }
        self._kinds = tuple(dtypes)
        self._shapes = {name: tensor.shape for name, tensor in spec.by_name.items()}

    def kinds(self) -> tuple[str, ...]:
        return self._kinds

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, kind: str, name: str, box: Box) -> torch.Tensor:
        return self.tensors[kind, name][tuple(slice(lo, hi) for lo, hi in box)]


def states(
    spec: ModelSpec, layout: Layout, dtypes: Mapping[str, torch.dtype], source: Numbers | CheckpointSource
) -> dict[int, ShardState]:
    """The shards of one unit, filled."""
    out = {}
    for rank in layout.ranks:
        state = ShardState.empty(shard(spec, layout, rank), dtypes)
        fill(state, source, {kind: kind for kind in dtypes})
        out[rank] = state
    return out


def write_unit(
    folder: Path, model: str, spec: ModelSpec, layout: Layout, unit: Mapping[int, ShardState]
) -> list[Part]:
    return [write_part(folder, model, spec, layout, rank, state) for rank, state in unit.items()]


def save(
    root: Path,
    step: int = 12,
    *,
    config: DecoderConfig = CONFIG,
    tp: int = 2,
    pp: int = 2,
    dtype: torch.dtype = torch.float32,
    keep_last: int | None = None,
) -> Path:
    """A committed checkpoint of one actor."""
    spec = decoder_spec(config)
    layout = Layout.make(spec, tp=tp, pp=pp, ranks=tuple(range(tp * pp)))
    dtypes = training_kinds(dtype)
    folder = begin(root, step)
    parts = write_unit(folder, "actor", spec, layout, states(spec, layout, dtypes, Numbers(spec, dtypes)))
    return commit(folder, {"actor": spec}, parts, replace(CONTROL, step=step), keep_last=keep_last)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of the model, with uneven stages and ranks in any order."""
    tp = draw(st.sampled_from([1, 2, 3, 6]))
    pp = draw(st.integers(1, 4))
    cuts = sorted(draw(st.sets(st.integers(1, CONFIG.num_layers - 1), min_size=pp - 1, max_size=pp - 1)))
    layers = tuple(hi - lo for lo, hi in zip([0, *cuts], [*cuts, CONFIG.num_layers], strict=True))
    ranks = tuple(draw(st.permutations(range(10, 10 + tp * pp))))
    return Layout(tp=tp, pp=pp, ranks=ranks, layers=layers)


@settings(max_examples=20, deadline=None)
@given(old=layouts(), new=layouts(), value=st.booleans(), multiple=st.sampled_from([1, 4]))
def test_what_one_layout_saved_another_loads_bit_for_bit(
    old: Layout, new: Layout, value: bool, multiple: int
) -> None:
    spec = decoder_spec(CONFIG.with_head("value" if value else "lm"), vocab_multiple=multiple)
    dtypes = training_kinds(torch.bfloat16)
    numbers = Numbers(spec, dtypes)
    with tempfile.TemporaryDirectory() as name:
        folder = begin(name, 12)
        parts = write_unit(folder, "actor", spec, old, states(spec, old, dtypes, numbers))
        path = commit(folder, {"actor": spec}, parts, CONTROL)
        source = open_checkpoint(path).source("actor")
        source.check(spec)
        loaded = states(spec, new, dtypes, source)
        wanted = states(spec, new, dtypes, numbers)
        for rank in new.ranks:
            for kind in dtypes:
                assert torch.equal(loaded[rank][kind].flat, wanted[rank][kind].flat), (rank, kind)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), tied=st.booleans())
def test_every_element_is_written_by_exactly_one_holder(layout: Layout, tied: bool) -> None:
    spec = decoder_spec(replace(CONFIG, tied=tied))
    owned = owned_pieces(spec, layout)
    assert tuple(owned) == layout.ranks
    for name, tensor in spec.by_name.items():
        boxes = [piece.box for pieces in owned.values() for piece in pieces if piece.logical == name]
        assert uncovered(tensor.shape, boxes) is None
    for rank, pieces in owned.items():
        assert set(pieces) <= set(shard(spec, layout, rank).pieces)


def test_replicas_are_shared_out_by_bytes() -> None:
    # tp 6 over 3 kv heads: k and v boxes are held twice, norms six times; all else is cut evenly.
    spec = decoder_spec(replace(CONFIG, vocab_size=36, intermediate_size=24))
    layout = Layout.make(spec, tp=6, pp=1, ranks=tuple(range(6)))
    written = [sum(box_size(p.box) for p in pieces) for pieces in owned_pieces(spec, layout).values()]
    held = [sum(box_size(p.box) for p in shard(spec, layout, rank).pieces) for rank in layout.ranks]
    assert sum(written) == spec.num_elements < sum(held)
    assert max(written) - min(written) <= CONFIG.hidden_size  # the last thing shared out is a norm


def test_partial_boxes_are_put_together_from_the_stored_ones(tmp_path: Path) -> None:
    path = save(tmp_path, tp=3, pp=1)
    source = open_checkpoint(path).source("actor")
    numbers = Numbers(decoder_spec(CONFIG), training_kinds(torch.float32))
    for name, box in (
        ("model.embed_tokens.weight", ((5, 33), (2, 9))),
        ("model.layers.2.mlp.down_proj.weight", ((1, 11), (0, 22))),
        ("model.layers.2.mlp.down_proj.weight", ((4, 4), (0, 22))),
        ("model.norm.weight", ((3, 7),)),
    ):
        for kind in ("theta", "exp_avg_sq"):
            assert torch.equal(source.read(kind, name, box), numbers.read(kind, name, box))


def test_a_checkpoint_holds_several_models_and_its_control_record(tmp_path: Path) -> None:
    actor, critic = decoder_spec(CONFIG), decoder_spec(replace(CONFIG, num_layers=2).with_head("value"))
    folder = begin(tmp_path, 12)
    parts = []
    for model, spec, tp in (("actor", actor, 2), ("critic", critic, 1)):
        dtypes = training_kinds(torch.float32)
        layout = Layout.make(spec, tp=tp, pp=1, ranks=tuple(range(tp)))
        parts += write_unit(folder, model, spec, layout, states(spec, layout, dtypes, Numbers(spec, dtypes)))
    path = commit(folder, {"actor": actor, "critic": critic}, parts, CONTROL)
    checkpoint = open_checkpoint(path)
    assert path == tmp_path / "step-000012" == latest(tmp_path)
    assert checkpoint.models == ("actor", "critic")
    assert checkpoint.control == CONTROL  # floats too: 0.1 + 0.2 and 1/3 come back to the bit
    checkpoint.source("critic").check(critic)
    with pytest.raises(CheckpointError, match="reward"):
        checkpoint.source("reward")
    with pytest.raises(CheckpointError, match="tensors differ"):
        checkpoint.source("critic").check(actor)


def test_gradients_are_not_stored(tmp_path: Path) -> None:
    spec = decoder_spec(CONFIG)
    layout = Layout.make(spec, tp=1, pp=1, ranks=(0,))
    dtypes = {"theta": torch.float32, "grad": torch.float32}
    folder = begin(tmp_path, 12)
    parts = write_unit(folder, "actor", spec, layout, states(spec, layout, dtypes, Numbers(spec, dtypes)))
    commit(folder, {"actor": spec}, parts, CONTROL)
    source = open_checkpoint(tmp_path / "step-000012").source("actor")
    assert source.kinds() == ("theta",)
    with pytest.raises(CheckpointError, match=r"grad/model\.norm\.weight"):
        source.read("grad", "model.norm.weight", ((0, 12),))


def test_a_half_written_checkpoint_is_never_picked(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    spec = decoder_spec(CONFIG)
    layout = Layout.make(spec, tp=1, pp=1, ranks=(0,))
    dtypes = training_kinds(torch.float32)
    folder = begin(tmp_path, 12)  # the crash comes after the parts, before the commit
    write_unit(folder, "actor", spec, layout, states(spec, layout, dtypes, Numbers(spec, dtypes)))
    assert latest(tmp_path) is None
    first = save(tmp_path, 10)
    assert latest(tmp_path) == first
    (tmp_path / "step-000014").mkdir()  # a copy that was cut short has no marker
    shutil.copytree(first / "actor", tmp_path / "step-000014" / "actor")
    assert latest(tmp_path) == first
    with pytest.raises(CheckpointError, match=r"not finished.*step-000010"):
        open_checkpoint(tmp_path / "step-000014")


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "marker"])
def test_damage_is_refused_and_the_intact_one_before_it_is_named(tmp_path: Path, harm: str) -> None:
    good, bad = save(tmp_path, 10), save(tmp_path, 12)
    file = sorted((bad / "actor").glob("*.safetensors"))[1]
    raw = bytearray(file.read_bytes())
    if harm == "flip":
        raw[-5] ^= 1
        file.write_bytes(raw)
    elif harm == "truncate":
        file.write_bytes(raw[:-8])
    elif harm == "delete":
        file.unlink()
    else:
        (bad / "COMMIT").write_text("{")
    for use in (latest, lambda _: open_checkpoint(bad)):
        with pytest.raises(CheckpointError) as caught:
            use(tmp_path)
        assert str(bad) in str(caught.value)
        assert f"use the intact {good}" in str(caught.value)
    assert open_checkpoint(good).control.step == 10


def test_sizes_alone_do_not_read_the_tensors(tmp_path: Path) -> None:
    path = save(tmp_path)
    file = next((path / "actor").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert damage(path, checksums=False) is None
    assert "checksum" in str(damage(path, checksums=True))


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 1_000_000):
        save(tmp_path, step, keep_last=2, tp=1, pp=1)
    assert [path.name for path in committed(tmp_path)] == ["step-000008", "step-1000000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000008", "step-1000000"]


def test_the_same_step_again_replaces_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 12, tp=3, pp=2)
    path = save(tmp_path, 12, tp=1, pp=1)
    assert [file.name for file in (path / "actor").glob("*.safetensors")] == ["part-00000.safetensors"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-000012"]


def test_what_crashed_writers_left_is_cleared(tmp_path: Path) -> None:
    begin(tmp_path, 999_998)
    assert abandon(tmp_path) == ()  # without a checkpoint nothing is known to be older
    save(tmp_path, 1_000_000, tp=1, pp=1)
    newer = begin(tmp_path, 1_000_002)
    assert [path.name for path in abandon(tmp_path)] == ["step-999998.tmp"]
    assert newer.is_dir()


def test_a_disk_that_refuses_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "step-000012.tmp").write_text("a file where the folder should be")
    spec = decoder_spec(CONFIG)
    layout = Layout.make(spec, tp=1, pp=1, ranks=(0,))
    state = ShardState.empty(shard(spec, layout, 0), {"theta": torch.float32})
    with pytest.raises(CheckpointError, match="the previous checkpoint still holds"):
        write_part(tmp_path / "step-000012.tmp", "actor", spec, layout, 0, state)


def test_a_missing_part_is_not_committed(tmp_path: Path) -> None:
    spec = decoder_spec(CONFIG)
    layout = Layout.make(spec, tp=2, pp=1, ranks=(0, 1))
    dtypes = training_kinds(torch.float32)
    folder = begin(tmp_path, 12)
    parts = write_unit(folder, "actor", spec, layout, states(spec, layout, dtypes, Numbers(spec, dtypes)))
    with pytest.raises(CheckpointError, match=r"elements are there"):
        commit(folder, {"actor": spec}, parts[:1], CONTROL)
    with pytest.raises(CheckpointError, match=r"no theta"):
        commit(folder, {"actor": spec, "critic": spec}, parts, CONTROL)
    (folder / "actor" / parts[0].file).unlink()
    with pytest.raises(CheckpointError, match="storage that all nodes share"):
        commit(folder, {"actor": spec}, parts, CONTROL)
    assert latest(tmp_path) is None


def test_boxes_that_overlap_or_leave_gaps_are_found() -> None:
    assert uncovered((4, 2), [((0, 2), (0, 2)), ((2, 4), (0, 2))]) is None
    assert "overlap" in str(uncovered((4, 2), [((0, 3), (0, 2)), ((2, 4), (0, 2))]))
    assert "6 of 8" in str(uncovered((4, 2), [((0, 3), (0, 2))]))


@pytest.mark.parametrize(
    ("stored", "wanted", "choice"),
    [
        ("fp32", "fp32", {"theta": "theta", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}),
        (
            "fp32",
            "bf16",
            {"theta": "theta", "master": "theta", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
        ),
        ("bf16", "fp32", {"theta": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}),
    ],
)
def test_a_resume_may_change_precision(
    tmp_path: Path, stored: str, wanted: str, choice: dict[str, str]
) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}
    source = open_checkpoint(save(tmp_path, dtype=dtype[stored])).source("actor")
    assert kinds_to_fill([*training_kinds(dtype[wanted]), "grad"], source) == choice
    assert kinds_to_fill(["theta"], source) == {"theta": "theta"}


def test_moments_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    spec = decoder_spec(CONFIG)
    layout = Layout.make(spec, tp=1, pp=1, ranks=(0,))
    dtypes = {"theta": torch.float32}
    folder = begin(tmp_path, 12)
    parts = write_unit(folder, "actor", spec, layout, states(spec, layout, dtypes, Numbers(spec, dtypes)))
    source = open_checkpoint(commit(folder, {"actor": spec}, parts, CONTROL)).source("actor")
    with pytest.raises(CheckpointError, match="exp_avg, exp_avg_sq wanted"):
        kinds_to_fill(training_kinds(torch.float32), source)


def test_a_control_record_of_another_version_is_refused() -> None:
    assert Control.from_json(CONTROL.to_json()) == CONTROL
    raw = json.loads(CONTROL.to_json()) | {"colour": "blue"}
    with pytest.raises(CheckpointError, match="colour"):
        Control.from_json(json.dumps(raw))


def test_a_source_travels_to_another_process(tmp_path: Path) -> None:
    source = open_checkpoint(save(tmp_path)).source("actor")
    copy = pickle.loads(pickle.dumps(source))
    shape = source.shapes()["model.norm.weight"]
    assert torch.equal(
        copy.read("theta", "model.norm.weight", whole(shape)),
        source.read("theta", "model.norm.weight", whole(shape)),
    )


def test_the_strategy_makes_only_valid_layouts() -> None:
    with pytest.raises(InvalidLayout):
        Layout.make(decoder_spec(CONFIG), tp=4, pp=1, ranks=tuple(range(4)))
