"""Why this plan: the next best ones, and for every family of layouts why it was not chosen."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count

import numpy as np

from nereus.planner.candidate_set import problem_of
from nereus.planner.choose import Priced, best_of
from nereus.planner.fixed import Cut
from nereus.planner.lean import leanest
from nereus.planner.plan import Plan
from nereus.planner.search import root_bound
from nereus.planner.workload import ModelStage

_ACTOR = (ModelStage.ACTOR_GENERATION, ModelStage.ACTOR_TRAINING)
_WORTH_SOLVING = 1.25  # a family whose bound is beyond this many times the best step is only bounded


class Verdict(StrEnum):
    """What became of a family of layouts."""

    BEST = "best"
    SLOWER = "slower"
    NO_ROOM = "no room"
    TOO_BIG = "too big"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All candidates of a model-stage with one (tp, pp, ep, cp), and why they are not in the plan.

    `step_s` is the best step with the family when `proven_best`, else a lower bound of it; None where it
    does not fit. `reason` says it in words.
    """

    model_stage: ModelStage
    tp: int
    pp: int
    ep: int
    cp: int
    verdict: Verdict
    step_s: float | None
    proven_best: bool
    reason: str

    def to_json(self) -> dict[str, str | int | float | bool | None]:
        """The family as plain JSON values."""
        return asdict(self)


def runner_ups(priced: Priced, best: Plan, num: int = 3) -> tuple[Plan, ...]:
    """The next best plans that cut the actor otherwise, best first; exact.

    Two plans are variations of one idea when (tp, pp, ep, cp) of the actor's generation and of its training
    agree. Each plan taken splits what is left in two: other cuts of generation, and the same with other cuts
    of training (Lawler's partition).
    """
    number = count()
    heap: list[tuple[float, int, Plan, Priced]] = [(best.step_s, next(number), best, priced)]
    taken: list[Plan] = []
    while heap and len(taken) <= num:
        _, _, plan, space = heapq.heappop(heap)
        taken.append(plan)
        for rest in _without(space, plan):
            found = best_of(rest)
            if found is not None:
                heapq.heappush(heap, (found.step_s, next(number), found, rest))
    return tuple(taken[1:])


def _without(priced: Priced, plan: Plan) -> list[Priced]:
    """The rest of the space without the plan's cuts of the actor, in disjoint parts."""
    rest: list[Priced] = []
    for model_stage in _ACTOR:
        chosen = plan.of(model_stage)
        same = priced.set_of(model_stage).has_cut(chosen.cut)
        rest.append(priced.keep(model_stage, ~same))
        priced = priced.keep(model_stage, same)
    return rest


def families(priced: Priced, best: Plan, model_stages: Iterable[ModelStage] = _ACTOR) -> tuple[Family, ...]:
    """Every (tp, pp, ep, cp) of these model-stages with its verdict.

    A family is solved by itself unless its bound already lies far beyond the best step.
    """
    found: list[Family] = []
    for model_stage in model_stages:
        item = priced.set_of(model_stage)
        columns = (item.tp, item.pp, item.ep, item.cp)
        fitting = set(zip(*(column.tolist() for column in columns), strict=True))
        chosen = best.of(model_stage)
        for cut in item.cuts:
            if cut == chosen.cut:
                continue
            found.append(
                _solved(priced, best, model_stage, cut)
                if cut in fitting
                else _too_big(priced, model_stage, cut)
            )
    return tuple(found)


def _solved(priced: Priced, best: Plan, model_stage: ModelStage, cut: Cut) -> Family:
    only = priced.keep(model_stage, priced.set_of(model_stage).has_cut(cut))
    tp, pp, ep, cp = cut
    bound_s = min(root_bound(problem_of(only.request, only.sets, at)) for at in only.request.arrangements)
    if np.isfinite(bound_s) and bound_s > _WORTH_SOLVING * best.step_s:
        return Family(
            model_stage=model_stage,
            tp=tp,
            pp=pp,
            ep=ep,
            cp=cp,
            verdict=Verdict.SLOWER,
            step_s=bound_s,
            proven_best=False,
            reason=f"a step takes at least {bound_s:.4g} s (+{bound_s / best.step_s - 1:.0%})",
        )
    plan = best_of(only) if np.isfinite(bound_s) else None
    if plan is None:
        return Family(
            model_stage=model_stage,
            tp=tp,
            pp=pp,
            ep=ep,
            cp=cp,
            verdict=Verdict.NO_ROOM,
            step_s=None,
            proven_best=True,
            reason="fits a GPU by itself, but not beside the other model-stages",
        )
    return Family(
        model_stage=model_stage,
        tp=tp,
        pp=pp,
        ep=ep,
        cp=cp,
        verdict=Verdict.SLOWER,
        step_s=plan.step_s,
        proven_best=True,
        reason=f"the best step with it takes {plan.step_s:.4g} s (+{plan.step_s / best.step_s - 1:.1%})",
    )


def _too_big(priced: Priced, model_stage: ModelStage, cut: Cut) -> Family:
    need = leanest(priced.request, model_stage, cut)
    return Family(
        model_stage=model_stage,
        tp=cut[0],
        pp=cut[1],
        ep=cut[2],
        cp=cut[3],
        verdict=Verdict.TOO_BIG,
        step_s=None,
        proven_best=True,
        reason=need.text,
    )
