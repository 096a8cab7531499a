"""Whether a change of layout is moved in shadow or in bounded mode, by the memory that its ranks have.

Shadow mode holds the old and the new shard at once and can be undone until the decision. Bounded mode holds
little more than one of them, but frees what it has moved, so some replica must stay as it is meanwhile: where
every unit changes, the change is made in two stages, one replica being left for the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereus.emu.layout import Rank
from nereus.emu.rank_plan import Mode
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.tensor import ModelSpec
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
    # Nothing is stale any more once the first stage has filled its units and ended all others but one.
    return _replan(plan, plan.old, now, plan.source, plan.lost), _replan(plan, now, plan.new, plan.model)


def _in_the_way(plan: ReshardPlan, old: Unit) -> tuple[Unit, ...]:
    return tuple(unit for unit in plan.new if unit.ranks & old.ranks)


def _replan(
    plan: ReshardPlan,
    old: tuple[Unit, ...],
    new: tuple[Unit, ...],
    source: ModelSpec,
    lost: frozenset[Rank] = frozenset(),
) -> ReshardPlan:
    return plan_reshard(
        plan.model,
        old,
        new,
        plan.moves,
        plan.topology,
        source=source,
        placement="as_given",
        stale=lost,
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


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a model-stage changes: its plans in shadow mode, and the one plan `whole` from all of its old units
    to all of its new ones, which bounded mode needs; None where it can only be moved in shadow mode.
    """

    plans: tuple[ReshardPlan, ...]
    whole: ReshardPlan | None


def choose_together(changes: Mapping[str, Change], free_bytes: Mapping[Rank, int]) -> dict[str, Moves]:
    """The model-stages that are to be moved in bounded mode so that all changes fit side by side: none where
    they fit in shadow mode, in which the largest ones stay where some do.

    `free_bytes` is what ranks may hold beside what they hold now. Raises InvalidOperation when nothing fits.
    """
    shadow = {name: _beside(change.plans) for name, change in changes.items()}
    asked = _together(shadow.values())
    if all(asked.get(rank, 0) <= free for rank, free in free_bytes.items()):
        return {}
    tight = {name: _tight(change) for name, change in changes.items()}
    least = {name: _smaller(amounts, tight[name]) for name, amounts in shadow.items()}
    out: dict[str, Moves] = {}
    for name in sorted(changes, key=lambda name: -sum(shadow[name].values())):
        whole = changes[name].whole
        if whole is None:
            continue
        others = [amounts for other, amounts in least.items() if other != name]
        room = {
            rank: free + whole.held_bytes(rank) - sum(amounts.get(rank, 0) for amounts in others)
            for rank, free in free_bytes.items()
        }
        moves = choose_moves(whole, room)
        if moves.mode == "shadow" and not all(
            amount + sum(amounts.get(rank, 0) for amounts in others) <= free_bytes.get(rank, 1 << 60)
            for rank, amount in shadow[name].items()
        ):
            # The plans by chain stage more than the one plan does.
            moves = Moves(mode="bounded", plans=stages_of(whole))
        if moves.mode == "bounded":
            out[name], least[name] = moves, tight[name]
        else:
            least[name] = shadow[name]
    _check_fit(least, free_bytes)
    return out


def shadow_bytes(changes: Mapping[str, Change]) -> dict[Rank, int]:
    """Most bytes by rank that all changes hold in shadow mode beside the old shards."""
    return _together(_beside(change.plans) for change in changes.values())


def _together(amounts: Iterable[Mapping[Rank, int]]) -> dict[Rank, int]:
    out: Counter[Rank] = Counter()
    for each in amounts:
        out.update(each)
    return dict(out)


def _check_fit(beside: Mapping[str, Mapping[Rank, int]], free_bytes: Mapping[Rank, int]) -> None:
    asked = _together(beside.values())
    if short := {rank: asked[rank] for rank, free in free_bytes.items() if asked.get(rank, 0) > free}:
        rank, amount = next(iter(short.items()))
        raise InvalidOperation(
            explain(
                "cannot move the state within the memory at hand",
                values=f"ranks {sorted(short)}; rank {rank} needs {amount} of {free_bytes[rank]} free bytes",
                rule="old and new storage that coexist must fit",
                remedy="free memory on these ranks, or go through a checkpoint",
            )
        )


def _beside(plans: tuple[ReshardPlan, ...]) -> dict[Rank, int]:
    """Most bytes by rank that shadow mode holds beside the old shards."""
    out: dict[Rank, int] = {}
    for plan in plans:
        for rank in plan.ranks:
            out[rank] = out.get(rank, 0) + plan.peak_bytes(rank) - plan.held_bytes(rank)
    return out


def _smaller(shadow: dict[Rank, int], tight: dict[Rank, int]) -> dict[Rank, int]:
    return {rank: min(amount, tight.get(rank, amount)) for rank, amount in shadow.items()}


def _tight(change: Change) -> dict[Rank, int]:
    """The same in bounded mode, over all of its stages; nothing where it is not possible."""
    whole = change.whole
    if whole is None:
        return {}
    try:
        stages = stages_of(whole)
    except InvalidOperation:
        return {}  # no replica can be left alone
    out: dict[Rank, int] = {}
    for stage in stages:
        for rank in stage.ranks:
            more = stage.peak_bytes(rank, "bounded") - whole.held_bytes(rank)
            out[rank] = max(out.get(rank, 0), more)
    return out
