"""A move between disjoint ranks as one resharding of every tensor between two meshes, where it is one.

    old units ── tensor by tensor ──▶ mesh (replicas, shards), one dim cut   ┐
                                                                            ├─▶ MeshMove ─▶ `nccl.m2n.reshard`
    new units ── tensor by tensor ──▶ mesh (replicas, shards), one dim cut   ┘

`nccl.m2n` moves one tensor from a communicator's first ranks to its last ones. Each side is cut evenly along
one dim and stored as one run of memory, and replicas of a shard are a row of the mesh. What does not fit that
(ranks on both sides, padding, uneven cuts, a cast, interleaved fusing) is refused here, by name, before
anything moves: the exchange of `lowering` has no such limits. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nereus.emu.decoder import DType
from nereus.emu.kinds import KindMove
from nereus.emu.layout import Rank, shard
from nereus.emu.regions import stored_rows
from nereus.emu.tensor import Box, ModelSpec
from nereus.emu.unit import Unit
from nereus.errors import InvalidOperation, explain

if TYPE_CHECKING:
    from nereus.emu.reshard import ReshardPlan

# The library's own limits (nccl-extensions 0.1): shards that meet in one of the other side, and dims.
MAX_SOURCES, MAX_TARGETS, MAX_DIMS = 16, 64, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSide:
    """One tensor on one side: `num_shards` even cuts along `dim`, and replicas of all of them.

    `ranks[replica * num_shards + i]` holds shard i, of shape `shape`, at its place: a box of a physical
    tensor.
    """

    num_replicas: int
    num_shards: int
    dim: int
    shape: tuple[int, ...]
    ranks: tuple[Rank, ...]
    places: tuple[tuple[str, Box], ...]

    def place(self, rank: Rank) -> tuple[str, Box] | None:
        """Where the rank stores its shard; None for a rank of the other side."""
        return self.places[self.ranks.index(rank)] if rank in self.ranks else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMove:
    """One kind of one logical tensor from `source` to `target`; collective over the ranks of both."""

    logical: str
    move: KindMove
    source: MeshSide
    target: MeshSide

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """In the order of the communicator: the source's mesh, then the target's."""
        return self.source.ranks + self.target.ranks

    @property
    def dtype(self) -> DType:
        """Of both sides."""
        return self.move.source.dtype


def mesh_moves(plan: ReshardPlan) -> tuple[MeshMove, ...]:
    """Every tensor of the plan as a move between meshes, in one order for all ranks.

    Raises InvalidOperation, which names the tensor and the rule, where one cannot be moved so.
    """
    givers, takers = ({rank for unit in units for rank in unit.ranks} for units in (plan.old, plan.new))
    if both := sorted((givers & takers) | (givers & plan.lost)):
        raise _refused("the move", f"ranks {both} are on both sides, or lost", "the two sides are disjoint")
    for move in plan.moves:
        if move.source.dtype != move.target.dtype:
            raise _refused(f"{move.source.name}", f"{move.source} to {move.target}", "nothing is cast")
    sources, targets = _sides(plan.source, plan.old), _sides(plan.model, plan.new)
    for name in targets:
        _check_meeting(name, sources[name], targets[name])
    return tuple(
        MeshMove(logical=name, move=move, source=sources[name], target=side)
        for name, side in targets.items()
        for move in plan.moves
    )


def _sides(spec: ModelSpec, units: Sequence[Unit]) -> dict[str, MeshSide]:
    """By logical tensor, in the order of the model."""
    held: dict[str, dict[Box, list[tuple[Rank, str, Box, bool]]]] = defaultdict(lambda: defaultdict(list))
    for unit in units:
        for rank in unit.layout.ranks:
            for tensor in shard(spec, unit.layout, rank).tensors:
                for piece in tensor.pieces:
                    rows = stored_rows(piece.stored, tensor.shape)
                    run = rows is not None and rows.num == 1
                    held[piece.logical][piece.box].append((rank, piece.physical, piece.stored, run))
    return {one.name: _side(one.name, one.shape, held[one.name]) for one in spec.tensors}


def _side(name: str, shape: tuple[int, ...], boxes: dict[Box, list[tuple[Rank, str, Box, bool]]]) -> MeshSide:
    order = sorted(boxes)
    holders = [boxes[box] for box in order]
    cut = [dim for dim in range(len(shape)) if len({box[dim] for box in order}) > 1]
    sizes = {tuple(hi - lo for lo, hi in box) for box in order}
    ranks = [rank for held in holders for rank, *_ in held]
    if len(shape) > MAX_DIMS:
        raise _refused(name, f"shape {shape}", f"at most {MAX_DIMS} dims")
    if len(cut) > 1 or len(sizes) > 1 or shape[cut[0] if cut else 0] % len(order):
        raise _refused(name, f"shape {shape} in parts of {sorted(sizes)}", "one dim is cut, evenly")
    if len({len(held) for held in holders}) > 1 or len(set(ranks)) < len(ranks):
        raise _refused(name, f"held by {ranks}", "each rank has one shard, each shard as many replicas")
    if not all(run for held in holders for *_, run in held):
        raise _refused(name, "a shard with gaps", "a shard is one run of memory")
    replicas = len(holders[0])
    entries = [held[replica] for replica in range(replicas) for held in holders]
    return MeshSide(
        num_replicas=replicas,
        num_shards=len(order),
        dim=cut[0] if cut else 0,
        shape=next(iter(sizes)),
        ranks=tuple(rank for rank, *_ in entries),
        places=tuple((physical, stored) for _, physical, stored, _ in entries),
    )


def _check_meeting(name: str, source: MeshSide, target: MeshSide) -> None:
    """Refuse where too many shards of one side meet in one of the other."""
    for one, other, most in ((target, source, MAX_SOURCES), (source, target, MAX_TARGETS)):
        if one.dim != other.dim or one.num_shards == 1:
            meeting = other.num_shards
        else:
            edges = range(one.num_shards)
            meeting = max(
                -(-(i + 1) * other.num_shards // one.num_shards) - i * other.num_shards // one.num_shards
                for i in edges
            )
        if meeting > most:
            raise _refused(name, f"{meeting} shards meet in one", f"at most {most}")


def _refused(name: str, values: str, rule: str) -> InvalidOperation:
    return InvalidOperation(
        explain(
            f"cannot move {name} by nccl.m2n",
            values=values,
            rule=rule,
            remedy="leave NEREUS_M2N unset: the exchange between pairs moves it",
        )
    )
