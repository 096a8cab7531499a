"""Whether a change of layout is moved in shadow or in bounded mode, by the memory that its ranks have.

Shadow mode holds the old and the new shard at once and can be undone until the decision. Bounded mode holds
little more than one of them, but frees what it has moved, so some replica must stay as it is meanwhile: where
every unit changes, the change is made in two stages, one replica being left for the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.emu.layout import Rank
from nereus.emu.rank_plan import Mode
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.unit import Unit
from nereus.errors import InvalidOperation, explain


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How a change is carried out: its plans, each a transaction of its own, and the mode of all."""

    mode: Mode
    plans: tuple[ReshardPlan, ...]


def choose_moves(plan: ReshardPlan, room_bytes: Mapping[Rank, int]) -> Moves:
    """Shadow mode where its peaks fit, bounded mode otherwise.

    `room_bytes` is what a rank may hold of this model-stage at once, its old shard included; a rank without
    an entry has room for anything. Raises InvalidOperation when no mode fits.
    """
    if not (short := _short(plan, "shadow", room_bytes)):
        return Moves(mode="shadow", plans=(plan,))
    stages = stages_of(plan)
    for stage in stages:
        if tight := _short(stage, "bounded", room_bytes):
            raise InvalidOperation(
                explain(
                    "cannot move the state within the memory at hand",
                    values=f"shadow: {short}; bounded: {tight}",
                    rule="old and new storage that coexist must fit",
                    remedy="free memory on these ranks, or go through a checkpoint",
                )
            )
    return Moves(mode="bounded", plans=stages)


def stages_of(plan: ReshardPlan) -> tuple[ReshardPlan, ...]:
    """The change as plans that each keep a unit, which bounded mode needs as its backup: one, or two.

    Raises InvalidOperation where every new unit needs a rank of every old one, as at dp = 1.
    """
    if any(unit in plan.old for unit in plan.new):
        return (plan,)
    sound = [unit for unit in plan.old if not unit.ranks & plan.lost]
    # The replica in whose way the fewest new units are stays for the second stage.
    best = min(sound, key=lambda old: len(_in_the_way(plan, old)), default=None)
    waiting = plan.new if best is None else _in_the_way(plan, best)
    if best is None or len(waiting) == len(plan.new):
        raise InvalidOperation(
            explain(
                "cannot move the state in bounded mode",
                values=f"from {', '.join(map(str, plan.old))} to {', '.join(map(str, plan.new))}",
                rule="bounded mode frees old storage while it moves, so one replica must stay untouched",
                remedy="use shadow mode, or checkpoint first and restore on failure",
            )
        )
    first = tuple(unit for unit in plan.new if unit not in waiting)
    now = (best, *first)
    return _replan(plan, plan.old, now), _replan(plan, now, plan.new)


def _in_the_way(plan: ReshardPlan, old: Unit) -> tuple[Unit, ...]:
    return tuple(unit for unit in plan.new if unit.ranks & old.ranks)


def _replan(plan: ReshardPlan, old: tuple[Unit, ...], new: tuple[Unit, ...]) -> ReshardPlan:
    return plan_reshard(
        plan.model,
        old,
        new,
        plan.moves,
        plan.topology,
        placement="as_given",
        lost=plan.lost & {rank for unit in old for rank in unit.ranks},
        limits=plan.limits,
    )


def _short(plan: ReshardPlan, mode: Mode, room_bytes: Mapping[Rank, int]) -> str:
    """The ranks whose peak does not fit, in words; nothing when all fit."""
    peaks = {rank: plan.peak_bytes(rank, mode) for rank in plan.ranks if rank in room_bytes}
    return ", ".join(
        f"rank {rank} would hold {peak} of {room_bytes[rank]} bytes"
        for rank, peak in peaks.items()
        if peak > room_bytes[rank]
    )
