"""What a reshard plan refuses before a byte moves: units that do not fit together, parts without a holder."""

from __future__ import annotations

from collections import Counter

from nereus.emu.kinds import KindMoves, same_kinds
from nereus.emu.layout import Rank
from nereus.emu.partition import Partition
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit import Unit
from nereus.errors import InvalidOperation, NoSource, explain


def check_units(
    old: tuple[Unit, ...], new: tuple[Unit, ...], kinds: KindMoves | None, lost: frozenset[Rank]
) -> KindMoves:
    """The moves of kinds, once the units are known to fit together. Raises InvalidOperation otherwise."""
    if not old or not new:
        raise _unfit(
            f"{len(old)} old and {len(new)} new units",
            "both sides need at least one unit",
            "load a checkpoint to start from nothing",
        )
    for side, units in (("old", old), ("new", new)):
        counts = Counter(rank for unit in units for rank in unit.layout.ranks)
        if twice := sorted(rank for rank, count in counts.items() if count > 1):
            raise _unfit(
                f"ranks {twice} lie in two {side} units", "I1: a rank is in one unit", "give disjoint units"
            )
    if dead := sorted(lost & {rank for unit in new for rank in unit.layout.ranks}):
        raise _unfit(f"new units on lost ranks {dead}", "a lost rank can hold nothing", "choose live ranks")
    moves = same_kinds(old[0].kinds, new[0].kinds) if kinds is None else kinds
    for unit in old:
        if absent := [move.source for move in moves if move.source not in unit.kinds]:
            raise _unfit(
                f"{unit.id} lacks {', '.join(f'{k.name} in {k.dtype}' for k in absent)}",
                "every old unit is a source of every kind",
                "leave out units that do not carry it",
            )
    for unit in new:
        if set(unit.kinds) != {move.target for move in moves}:
            raise _unfit(
                f"{unit.id} has kinds {[k.name for k in unit.kinds]}",
                "every kind of a new unit comes from exactly one kind of the old ones",
                "name a source for each of its kinds",
            )
    return moves


def check_storage(model: ModelSpec, source: ModelSpec, *, kept: bool) -> None:
    """Raise InvalidOperation unless the two specs are one model, stored in two ways at most.

    `kept` tells whether a unit stays as it is, which it cannot under another storage.
    """
    if model.tensors != source.tensors:
        raise _unfit(
            f"{len(source.tensors)} tensors of the old units, {len(model.tensors)} of the new ones",
            "old and new units hold tensors of the same names, shapes and cuts, however they fuse them",
            "plan between engines of one model",
        )
    if kept and model.fused != source.fused:
        raise _unfit(
            "a unit is kept while its storage changes",
            "a unit that is kept keeps its storage",
            "give the units of the other engine ids of their own model-stage",
        )


def _unfit(values: str, rule: str, remedy: str) -> InvalidOperation:
    return InvalidOperation(explain("cannot plan the reshard", values=values, rule=rule, remedy=remedy))


def no_source(part: Partition, block: int, num_blocks: int, lost: frozenset[Rank]) -> NoSource:
    """The error that names the first part without a holder: tensor and interval."""
    first = part.blocks[block]
    cell, kind = first.cells[0], part.classes[first.kind]
    name = kind.names[first.instances[0]][cell.slot]
    interval = ", ".join(f"{lo}:{hi}" for lo, hi in cell.box)
    return NoSource(
        explain(
            f"cannot plan the reshard: no live rank holds {name}[{interval}]",
            values=f"{num_blocks} of {len(part.blocks)} blocks have no holder; lost ranks {sorted(lost)}",
            rule="every needed part must lie on a live rank",
            remedy="restore this model from its last checkpoint",
        )
    )
