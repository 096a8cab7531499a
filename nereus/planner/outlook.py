"""Which of several plans is best over what is to come: longer responses, forced moves, nodes that vanish.

The plan that is best for the last step's lengths is often best for a narrow range only, and the plan that
fits everything to come is often slow now. Both are settled by what they cost: a plan is rated by its expected
seconds a step over the outlook.

    E = mean over the lengths to come of  step            where the plan fits them
                                          best step + move where it does not: the job is then forced to move
        + loss * chance that nodes which vanish take the last copy of some trained model
        + read * the same of models that do not change, which are then read anew from storage
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import comb
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from nereus.planner.choose import Priced, best_of
from nereus.planner.held import Sizes, best, priced, scaled, sizes_of, with_layouts
from nereus.planner.plan import Plan
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import Placement, PlanRequest
from nereus.planner.workload import ModelStage

TRAINED = (ModelStage.ACTOR_TRAINING, ModelStage.CRITIC_TRAINING)
UNCHANGED = (ModelStage.REFERENCE_INFERENCE, ModelStage.REWARD_INFERENCE)
"""Together the model-stages that hold all of a model's state. A model is lost with the last whole unit of its
own: a trained one takes the job back to its checkpoint, one that does not change is read from its folder.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a plan is rated over; by default this step alone, as policies that do not look ahead do.

    `factors` are multiples of the lengths of now, now first. `move_s` is a forced move, spread over the steps
    that the outlook spans; `loss_s` what the loss of a last copy of a trained model costs, times its chance
    in a step, `read_s` the same of a model that does not change. `bursts` are the numbers of GPUs that vanish
    at once, with their shares of all sudden losses.
    """

    factors: tuple[float, ...] = (1.0,)
    move_s: float = 0.0
    loss_s: float = 0.0
    read_s: float = 0.0
    bursts: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def risk_s(self, plan: Plan, cluster: ClusterProfile) -> float:
        """Expected seconds a step that the plan loses with nodes that vanish."""
        if not (self.loss_s or self.read_s):
            return 0.0
        width = cluster.pools[0].gpus_per_node
        trained, unchanged = (
            sum(
                share * exposure(plan, cluster, holders, num_lost=-(-size // width))
                for size, share in self.bursts
            )
            for holders in (TRAINED, UNCHANGED)
        )
        return self.loss_s * trained + self.read_s * unchanged


NOW = Outlook()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """A plan for now. `order` is least for the best: fits responses longer by the headroom, expected step."""

    plan: Plan
    order: tuple[bool, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """What makes a plan near to the one in force: its cuts, and few units of models that are to be read anew.

    `lost` are the model-stages of models that do not change of which no whole unit is left.
    """

    plan: Plan
    lost: frozenset[ModelStage] = frozenset()

    def plans(self, request: PlanRequest, largest: ClusterProfile) -> list[Plan | None]:
        """The best plans with these cuts, with one unit of all that is lost, and with both."""
        free = priced(request, largest)
        once = free
        for stage in self.lost:
            once = once.keep(stage, once.set_of(stage).dp == 1)
        found = [self._with_cuts(free)]
        if self.lost:
            found += [best_of(once), self._with_cuts(once)]
        return found

    def _with_cuts(self, chosen: Priced) -> Plan | None:
        for item in self.plan.assignments:
            chosen = chosen.keep(item.model_stage, chosen.set_of(item.model_stage).has_cut(item.cut))
        return best_of(chosen)


def rated(
    request: PlanRequest,
    largest: ClusterProfile,
    headroom: float,
    outlook: Outlook,
    near: Near | None = None,
) -> tuple[Rating, ...]:
    """The plans that fit now and are best somewhere in the outlook, with headroom, against losses, or among
    those that are `near`.

    `largest` as for `held.priced`.
    """
    longer = 1 + headroom
    found = [best(scaled(request, factor), largest) for factor in (*outlook.factors, longer)]
    if outlook.loss_s > 0:
        found += [replicated(request, largest), replicated(scaled(request, longer), largest)]
    if near is not None:
        found += near.plans(request, largest)
    options = {(sizes_of(plan), plan.arrangement.placement): plan for plan in found if plan is not None}
    rows = [
        [_plan(request, largest, option, factor) for factor in (*outlook.factors, longer)]
        for option in options
    ]
    least = [
        min((plan.step_s for plan in column if plan is not None), default=None)
        for column in zip(*rows, strict=True)
    ][:-1]
    return tuple(
        Rating(
            plan=row[0],
            order=(
                row[-1] is None,
                expected_s([None if plan is None else plan.step_s for plan in row[:-1]], least, outlook)
                + outlook.risk_s(row[0], request.cluster),
            ),
        )
        for row in rows
        if row[0] is not None
    )


def expected_s(steps: Iterable[float | None], least: Iterable[float | None], outlook: Outlook) -> float:
    """Mean step over the outlook; None where a plan does not fit. Lengths that none fits do not count."""
    return fmean(
        instead + outlook.move_s if step is None else step
        for step, instead in zip(steps, least, strict=True)
        if instead is not None
    )


def replicated(request: PlanRequest, largest: ClusterProfile) -> Plan | None:
    """The best plan in which every trained model has at least two whole copies; None where none fits."""
    chosen: Priced = priced(request, largest)
    for item in chosen.sets:
        if item.model_stage in TRAINED:
            chosen = chosen.keep(item.model_stage, item.dp >= 2)
    return best_of(chosen)


def exposure(
    plan: Plan, cluster: ClusterProfile, holders: Collection[ModelStage] = TRAINED, *, num_lost: int = 1
) -> float:
    """The chance that so many nodes, lost at once without warning, take the last copy of some model that
    `holders` hold: the share of all choices of nodes, or of `_DRAWN` of them, that do.
    """
    width, count = cluster.pools[0].gpus_per_node, cluster.pools[0].num_nodes
    lost_cn = _choices(count, min(num_lost, count))
    fatal_c = np.zeros(len(lost_cn), dtype=bool)
    for item in plan.assignments:
        if item.model_stage in holders:
            on_un = np.zeros((len(item.units), count), dtype=bool)
            for unit, ranks in enumerate(item.units):
                on_un[unit, [rank // width for rank in ranks]] = True
            fatal_c |= (on_un.astype(int) @ lost_cn.T > 0).all(axis=0)
    return float(fatal_c.mean())


_DRAWN = 512


@lru_cache(maxsize=256)
def _choices(count: int, chosen: int) -> NDArray[np.int64]:
    """Choices [c, n] of so many of n nodes as 0 or 1: all, or `_DRAWN` drawn ones, the same every time."""
    if comb(count, chosen) <= _DRAWN:
        picked = list(combinations(range(count), chosen))
    else:
        draw = np.random.default_rng((count, chosen))
        picked = [tuple(draw.choice(count, chosen, replace=False)) for _ in range(_DRAWN)]
    out = np.zeros((len(picked), count), dtype=np.int64)
    for row, nodes in zip(out, picked, strict=True):
        row[list(nodes)] = 1
    return out


def _plan(
    request: PlanRequest, largest: ClusterProfile, option: tuple[Sizes, Placement], factor: float
) -> Plan | None:
    sizes, placement = option
    return with_layouts(scaled(replace(request, placement=placement), factor), sizes, largest)
