"""The moves that `benchmarks.reshard` times, and a rank's state before and after each, of some 220 MB."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.kinds import training_kinds
from nereus.emu.layout import Layout, shard
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId

# 16 M parameters, 14 bytes each: bf16 weights, fp32 master and Adam moments. Every tensor divides evenly by
# 8, so that DTensor and Megatron can describe the same shards.
CONFIG = DecoderConfig(
    vocab_size=8192,
    hidden_size=384,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=24,
    intermediate_size=1024,
)
MODEL = decoder_spec(CONFIG, vocab_multiple=64)
KINDS = training_kinds("bf16")
STATE_BYTES = MODEL.num_elements * sum(kind.num_bytes for kind in KINDS)
Shape = tuple[int, int, int]  # tp, pp, dp


@dataclass(frozen=True, slots=True)
class Case:
    """A change of shape on a number of processes."""

    name: str
    processes: int
    old: Shape
    new: Shape


CASES = (
    Case("Split tp4 -> 2 x tp2", 4, (4, 1, 1), (2, 1, 2)),
    Case("Merge 2 x tp2 -> tp4", 4, (2, 1, 2), (4, 1, 1)),
    Case("Extend tp2 x1 -> x2", 4, (2, 1, 1), (2, 1, 2)),
    Case("tp2pp2 -> tp4", 4, (2, 2, 1), (4, 1, 1)),
    Case("2 -> 4: tp2 -> pp2dp2", 4, (2, 1, 1), (1, 2, 2)),
    Case("Split tp8 -> 2 x tp4", 8, (8, 1, 1), (4, 1, 2)),
    Case("Merge 2 x tp4 -> tp8", 8, (4, 1, 2), (8, 1, 1)),
    Case("Extend tp2pp2 x1 -> x2", 8, (2, 2, 1), (2, 2, 2)),
    Case("2 x tp2pp2 -> 2 x tp4", 8, (2, 2, 2), (4, 1, 2)),
    Case("4 -> 8: tp4 -> tp2pp2dp2", 8, (4, 1, 1), (2, 2, 2)),
)


def units(shape: Shape, first_index: int) -> list[Unit]:
    """Units on contiguous ranks from 0."""
    tp, pp, dp = shape
    size = tp * pp
    return [
        Unit(
            id=UnitId("actor.training", first_index + i),
            model="actor",
            layout=Layout.make(MODEL, tp=tp, pp=pp, ranks=tuple(range(i * size, (i + 1) * size))),
            kinds=KINDS,
        )
        for i in range(dp)
    ]


def plan_of(case: Case, *, contiguous: bool = False) -> ReshardPlan:
    """The plan of a case; a replica that keeps its shape is kept, unless ranks must stay `contiguous`."""
    old = units(case.old, 0)
    grows = case.old[:2] == case.new[:2] and case.new[2] > case.old[2]
    new = units(case.new, 0 if grows else 100)
    here = Topology.single_node(case.processes, node_reads=True)
    return plan_reshard(MODEL, old, new, topology=here, placement="as_given" if contiguous else "max_overlap")


_DTYPES: Mapping[str, torch.dtype] = {kind.name: TORCH_DTYPE[kind.dtype] for kind in KINDS}


def logical(kind: str, name: str) -> Tensor:
    """A full logical tensor: distinct everywhere, equal on every rank."""
    shape = MODEL.by_name[name].shape
    start = zlib.crc32(f"{kind}/{name}".encode()) % 65521
    numbers = (torch.arange(prod(shape), dtype=torch.int32) * 1103 + start) % 65521 + 1
    if _DTYPES[kind] is torch.bfloat16:
        return numbers.to(torch.int16).view(torch.bfloat16).view(shape)  # bit patterns
    return numbers.to(torch.float32).view(shape)


def empty(unit: Unit | None, rank: int) -> ShardState | None:
    """A shard whose pages are in memory already, so that no method pays for the first touch."""
    if unit is None:
        return None
    state = ShardState.empty(shard(MODEL, unit.layout, rank), _DTYPES)
    for arena in state.arenas.values():
        arena.flat.fill_(0)
    return state


@lru_cache(maxsize=5)
def direct(unit: Unit | None, rank: int) -> ShardState | None:
    """A shard built straight from the definition; shared by the methods of a case, which only read it."""
    state = empty(unit, rank)
    if state is not None:
        for kind, arena in state.arenas.items():
            for piece in state.shard.pieces:
                whole = logical(kind, piece.logical)
                arena.piece(piece).copy_(whole[tuple(slice(lo, hi) for lo, hi in piece.box)])
    return state


def equal(a: ShardState | None, b: ShardState | None) -> bool:
    """Whether two shards are equal bit for bit."""
    if a is None or b is None:
        return a is b
    return all(
        torch.equal(a[kind].flat.view(torch.uint8), b[kind].flat.view(torch.uint8)) for kind in b.arenas
    )
