"""Who gets how many GPUs of a pool that several campaigns share. Pure: bids and grants to the next grants.

    planner of each campaign ─▶ bid: what one GPU more saves, what one less costs ─▶ next grants

It does not oscillate: one campaign's grant changes at a time, the next only when that change is done; a
grant that changed stays for the residence; and GPUs move only to where they are worth `margin` more. Values
are logarithms of step times, so every move makes the sum over the campaigns larger: with values that stay the
moves end. A campaign names how many GPUs it takes or gives, because one alone may be worth nothing to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

PRICELESS = 1e9
"""The worth of a GPU without which there is no plan. Finite, because bids travel as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """What a campaign has and what GPUs are worth to it, as of now.

    `gain` is what each of `take` GPUs more is worth, `loss` what each of `give` fewer costs: logarithms of
    the ratio of step times, a GPU. Where `take` or `give` is 0, it takes or gives none.
    """

    name: str
    held: int
    least: int
    most: int
    take: int = 0
    give: int = 0
    gain: float = 0.0
    loss: float = PRICELESS


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """How many GPUs a campaign may hold, and since when."""

    gpus: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When GPUs may move."""

    residence_s: float = 300.0
    """Least time between two changes of one campaign's grant."""
    margin: float = 0.2
    """Share by which a GPU must be worth more where it goes than where it is."""
    patience_s: float = 600.0
    """After so long a change that a campaign has not carried out is taken back to what it holds."""


def next_grants(
    num_gpus: int, bids: Iterable[Bid], grants: Mapping[str, Grant], *, now_s: float, rules: Rules
) -> dict[str, Grant]:
    """The grants from now on; at most one differs, beside those of campaigns that have ended.

    Bids come in the order in which their campaigns arrived. A campaign that has no grant yet gets its least
    as soon as that is free; until then nobody else gets more.
    """
    known = {bid.name: bid for bid in bids}
    kept = {name: grant for name, grant in grants.items() if name in known}
    if late := [name for name, grant in kept.items() if known[name].held != grant.gpus]:
        return _without_late(kept, known, late, now_s, rules)
    free = num_gpus - sum(grant.gpus for grant in kept.values())
    rested = {
        name: bid for name, bid in known.items() if name in kept and _is_rested(kept[name], now_s, rules)
    }
    givers = [bid for name, bid in rested.items() if 0 < bid.give <= kept[name].gpus - bid.least]
    takers = [
        bid for name, bid in rested.items() if 0 < bid.take <= bid.most - kept[name].gpus and bid.gain > 0
    ]
    giver = min(givers, key=lambda bid: (bid.loss, bid.name), default=None)
    arrived = next((bid for name, bid in known.items() if name not in kept and bid.least <= num_gpus), None)
    if arrived is not None:
        if arrived.least <= free:
            return kept | {arrived.name: Grant(gpus=arrived.least, since_s=now_s)}
        return kept if giver is None else _moved(kept, giver, -giver.give, now_s)
    fitting = [bid for bid in takers if bid.take <= free]
    if fitting:
        # By its whole worth, as the giver was asked to make room: else who gave might take it back.
        taker = max(fitting, key=lambda bid: (bid.gain * bid.take, bid.name))
        return _moved(kept, taker, taker.take, now_s)
    for taker in sorted(takers, key=lambda bid: (-bid.gain * bid.take, bid.name)):
        others = [bid for bid in givers if bid.name != taker.name and bid.give + free >= taker.take]
        giver = min(others, key=lambda bid: (bid.loss * bid.give, bid.name), default=None)
        if giver is None:
            continue
        cost = max(giver.loss, 0.0) * giver.give
        if taker.gain * taker.take > (1 + rules.margin) * cost:
            return _moved(kept, giver, -giver.give, now_s)
    return kept


def _is_rested(grant: Grant, now_s: float, rules: Rules) -> bool:
    return now_s - grant.since_s >= rules.residence_s


def _moved(grants: Mapping[str, Grant], bid: Bid, by: int, now_s: float) -> dict[str, Grant]:
    return {**grants, bid.name: Grant(gpus=grants[bid.name].gpus + by, since_s=now_s)}


def _without_late(
    grants: dict[str, Grant], bids: Mapping[str, Bid], late: Iterable[str], now_s: float, rules: Rules
) -> dict[str, Grant]:
    """While a change is under way nothing else changes. One that takes too long is given up.

    A campaign that holds more than its grant goes on holding it: what it has cannot be given to others.
    """
    for name in late:
        if now_s - grants[name].since_s >= rules.patience_s:
            held = max(bids[name].held, bids[name].least)
            grants[name] = Grant(gpus=held, since_s=now_s)
    return grants


def with_values(bid: Bid, step_s: Callable[[int], float | None], *, unit: int = 1) -> Bid:
    """The bid with what more and fewer GPUs are worth, from the best step at a number of GPUs (None without a
    plan). Both by 1, 2, 4 and 8 `unit`s: the most worth a GPU is taken, the least is given.
    """
    now_s, sizes = step_s(bid.held), [unit * count for count in (1, 2, 4, 8)]
    more = [
        (value(now_s, step_s(bid.held + size), size), -size) for size in sizes if bid.held + size <= bid.most
    ]
    fewer = [
        (value(step_s(bid.held - size), now_s, size), size) for size in sizes if bid.held - size >= bid.least
    ]
    gain, take = max(more, default=(0.0, 0))
    loss, give = min(fewer, default=(PRICELESS, 0))
    return replace(bid, gain=gain, take=-take, loss=loss, give=give)


def value(step_s: float | None, other_s: float | None, num_gpus: int) -> float:
    """The worth of each of `num_gpus` GPUs: the logarithm of the step time without them over that with.

    `PRICELESS` where there is no plan without them, nothing where there is none with them.
    """
    if other_s is None:
        return 0.0
    return PRICELESS if step_s is None else math.log(step_s / other_s) / num_gpus
