"""Which of several plans is best over what is to come: longer responses, forced moves, nodes that vanish.

The plan that is best for the last step's lengths is often best for a narrow range only, and the plan that
fits everything to come is often slow now. Both are settled by what they cost: a plan is rated by its expected
seconds a step over the outlook.

    E = mean over the lengths to come of  step            where the plan fits them
                                          best step + move where it does not: the job is then forced to move
        + loss * share of the nodes whose sudden loss ends the last copy of some trained model
        + read * the same of models that do not change, which are then read anew from storage
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

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
    in a step, `read_s` the same of a model that does not change.
    """

    factors: tuple[float, ...] = (1.0,)
    move_s: float = 0.0
    loss_s: float = 0.0
    read_s: float = 0.0

    def risk_s(self, plan: Plan, cluster: ClusterProfile) -> float:
        """Expected seconds a step that the plan loses with nodes that vanish."""
        if not (self.loss_s or self.read_s):
            return 0.0
        trained, unchanged = (exposure(plan, cluster, holders) for holders in (TRAINED, UNCHANGED))
        return self.loss_s * trained + self.read_s * unchanged


NOW = Outlook()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """A plan for now. `order` is least for the best: fits responses longer by the headroom, expected step."""

    plan: Plan
    order: tuple[bool, float]


def rated(
    request: PlanRequest, largest: ClusterProfile, headroom: float, outlook: Outlook
) -> tuple[Rating, ...]:
    """The plans that fit now and are best somewhere in the outlook, with headroom, or against losses.

    `largest` as for `held.priced`.
    """
    longer = 1 + headroom
    found = [best(scaled(request, factor), largest) for factor in (*outlook.factors, longer)]
    if outlook.loss_s > 0:
        found += [replicated(request, largest), replicated(scaled(request, longer), largest)]
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


def exposure(plan: Plan, cluster: ClusterProfile, holders: Collection[ModelStage] = TRAINED) -> float:
    """Share of the cluster's nodes each of which, lost without warning, takes the last copy of some model
    that `holders` hold.
    """
    width, count = cluster.pools[0].gpus_per_node, cluster.pools[0].num_nodes
    fatal: set[int] = set()
    for item in plan.assignments:
        if item.model_stage in holders:
            units = [{rank // width for rank in unit} for unit in item.units]
            fatal |= set.intersection(*units)
    return len(fatal) / count


def _plan(
    request: PlanRequest, largest: ClusterProfile, option: tuple[Sizes, Placement], factor: float
) -> Plan | None:
    sizes, placement = option
    return with_layouts(scaled(replace(request, placement=placement), factor), sizes, largest)
