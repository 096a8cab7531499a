"""Copies within a rank: rows of two arenas, against slicing their tensors."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
import torch

from nereus.emu.arena import TORCH_DTYPE, ShardState, offsets
from nereus.emu.far_copies import copy_far, runs
from nereus.emu.kinds import Kind, KindMove, KindMoves
from nereus.emu.lanes import Lanes
from nereus.emu.layout import PhysicalTensor, Position, Shard
from nereus.emu.local_copies import copy_local
from nereus.emu.rank_plan import LocalCopy, Region, Side
from nereus.emu.regions import stored_rows
from nereus.emu.staging import StagingPool
from nereus.emu.tensor import Box
from nereus.kernels.regions import FlatPair, RowPair, copy_rows
from tests.emu.late_device import LateDevice

SAME: KindMoves = (
    KindMove(Kind("theta", "bf16"), Kind("theta", "bf16")),
    KindMove(Kind("master", "fp32"), Kind("master", "fp32")),
)
CAST: KindMoves = (KindMove(Kind("master", "fp32"), Kind("theta", "bf16")), *SAME[1:])


def pool(lanes: Lanes | None = None) -> StagingPool:
    cpu = torch.device("cpu")
    return StagingPool(cpu, lanes or Lanes.of(cpu))


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    edges = (sorted(rng.sample(range(size + 1), 2)) for size in shape)
    return tuple(
        (0, size) if rng.random() < 0.4 else (lo, hi) for size, (lo, hi) in zip(shape, edges, strict=True)
    )


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 5, 8)) for _ in range(rng.choice((1, 2, 2, 3, 4))))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


@pytest.mark.parametrize("seed", range(200))
def test_rows_are_the_elements_of_the_box_in_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    box = random_box(rng, shape)
    numbers = np.arange(prod(shape)).reshape(shape)
    rows = stored_rows(box, shape)
    part = numbers[slices(box)]
    if rows is None:
        steps = {int(step) for step in np.diff(part.ravel())}
        assert len(steps) > 2 or part.ndim > 2
        return
    starts = rows.at + rows.stride * np.arange(rows.num)
    assert (starts[:, None] + np.arange(rows.width)).ravel().tolist() == part.ravel().tolist()
    assert (rows.num == 1) == part.flags.c_contiguous


def state_of(shapes: list[tuple[int, ...]], *, fill: bool, kinds: dict[str, torch.dtype]) -> ShardState:
    tensors = tuple(PhysicalTensor(name=f"t{i}", shape=shape, pieces=()) for i, shape in enumerate(shapes))
    state = ShardState.empty(Shard(position=Position(pp=0, tp=0), tensors=tensors), kinds)
    for arena in state.arenas.values():
        if fill:
            arena.flat.copy_(torch.randn(arena.flat.numel()))
    return state


def region(side: Side, number: int, box: Box, shape: tuple[int, ...]) -> Region:
    return Region(
        logical=f"t{number}",
        box=box,
        side=side,
        physical=f"t{number}",
        stored=box,
        rows=stored_rows(box, shape),
    )


@pytest.mark.parametrize("moves", [SAME, CAST], ids=["same", "cast"])
@pytest.mark.parametrize("seed", range(40))
def test_copies_equal_slices_and_touch_nothing_else(seed: int, moves: KindMoves) -> None:
    """Boxes of one shape anywhere in tensors of different shapes: a run, rows, or neither, on both sides."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    old_shapes, new_shapes, boxes = [], [], []
    for _ in range(6):
        shape = random_shape(rng)
        source = random_box(rng, shape)
        sizes = [hi - lo for lo, hi in source]
        ahead = [rng.choice((0, 0, 2)) for _ in sizes]
        new_shapes.append(
            tuple(at + size + rng.choice((0, 0, 1)) for at, size in zip(ahead, sizes, strict=True))
        )
        old_shapes.append(shape)
        boxes.append((source, tuple((at, at + size) for at, size in zip(ahead, sizes, strict=True))))
    kinds = {"theta": TORCH_DTYPE["bf16"], "master": TORCH_DTYPE["fp32"]}
    old = state_of(old_shapes, fill=True, kinds=kinds)
    new, expected = (state_of(new_shapes, fill=False, kinds=kinds) for _ in range(2))
    copies = [
        LocalCopy(
            source=region("old", i, source, old_shapes[i]),
            target=region("new", i, target, new_shapes[i]),
            moves=moves,
        )
        for i, (source, target) in enumerate(boxes)
    ]
    num_bytes = copy_local(copies, old, new, pool())
    for move in moves:
        for i, (source, target) in enumerate(boxes):
            part = old[move.source.name][f"t{i}"][slices(source)]
            expected[move.target.name][f"t{i}"][slices(target)] = part.to(expected[move.target.name].dtype)
    elements = sum(prod(hi - lo for lo, hi in source) for source, _ in boxes)
    assert num_bytes == elements * sum(move.target.num_bytes for move in moves)
    for kind in kinds:
        assert torch.equal(new[kind].flat.view(torch.uint8), expected[kind].flat.view(torch.uint8))


def test_tensors_that_follow_one_another_on_both_sides_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FlatPair] = []
    monkeypatch.setattr("nereus.emu.local_copies.copy_rows", seen.extend)
    shapes = [(4, 8), (32,), (2, 16), (3, 3), (32,)]  # a gap of 23 elements follows the fourth
    state = state_of(shapes, fill=True, kinds={"theta": TORCH_DTYPE["bf16"]})
    copies = [
        LocalCopy(source=region("old", i, box, shape), target=region("new", i, box, shape), moves=SAME[:1])
        for i, shape in enumerate(shapes)
        for box in [tuple((0, size) for size in shape)]
    ]
    copy_local(copies, state, state, pool())
    ((_, _, rows),) = seen
    starts = offsets(state.shard)[0]
    assert [(source, num, width) for source, _, num, width, _, _ in rows] == [
        (0, 1, 32 + 32 + 32 + 9),
        (starts["t4"], 1, 32),
    ]


def random_rows(rng: random.Random) -> tuple[list[RowPair], int, int]:
    """Rows that share no element on either side, and how many elements both sides have."""
    rows: list[RowPair] = []
    source_at = target_at = 0
    for _ in range(rng.randrange(1, 12)):
        num, width = rng.choice((1, 1, 3, 7)), rng.choice((1, 4, 33, 200))
        strides = width + rng.choice((0, 5, 300)), width + rng.choice((0, 2))
        rows.append((source_at, target_at, num, width, *(strides if num > 1 else (width, width))))
        source_at += num * strides[0] + rng.choice((0, 1, 6000))
        target_at += num * strides[1] + rng.choice((0, 3))
    rng.shuffle(rows)
    return rows, source_at + 1, target_at + 1


@pytest.mark.parametrize("seed", range(100))
def test_rows_from_the_host_pass_through_small_runs(seed: int) -> None:
    rng = random.Random(seed)
    rows, num_source, num_target = random_rows(rng)
    source = torch.randn(num_source)
    expected, found = torch.zeros(num_target), torch.zeros(num_target)
    copy_rows([(source, expected, rows)])
    most = rng.choice((7, 64, 1000, 1 << 20))
    device = LateDevice(seed)
    buffers = pool(device.for_move)
    copy_far([(source, found, rows)], buffers, run_bytes=4 * most)
    device.drain()
    assert torch.equal(found, expected)
    assert buffers.peak_bytes <= 4 * most, "one run at a time"
    carried = sum(hi - lo for lo, hi, _ in runs(rows, most))
    assert carried <= sum(num * stride + 4096 for _, _, num, _, stride, _ in rows)
