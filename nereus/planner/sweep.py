"""How the best plan changes as the work changes: one plan a point, and where an earlier one ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.planner.choose import Priced, best_of
from nereus.planner.lengths import LengthDistribution
from nereus.planner.plan import Assignment, Plan
from nereus.planner.request import PlanRequest
from nereus.planner.workload import Model

Change = Callable[[PlanRequest, float], PlanRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbouring points where the actor's generation and training have one best layout.

    `step_s[i]` is the step at every point of the sweep with these two layouts held (everything else still
    at its best), None where they do not fit.
    """

    plan: Plan
    first: int
    last: int
    step_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points, the best plan at each (None: nothing fits) and the segments of equal layouts."""

    values: tuple[float, ...]
    plans: tuple[Plan | None, ...]
    segments: tuple[Segment, ...]


def sweep(request: PlanRequest, values: Sequence[float], change: Change) -> Sweep:
    """Plan at every value; then hold the layouts of each segment's first plan everywhere."""
    priced = [Priced.of(change(request, value)) for value in values]
    plans = tuple(best_of(item) for item in priced)
    segments: list[Segment] = []
    for at, plan in enumerate(plans):
        if plan is None:
            continue
        last = segments[-1] if segments else None
        if last is not None and last.last == at - 1 and layouts_of(last.plan) == layouts_of(plan):
            segments[-1] = replace(last, last=at)
            continue
        held = [best_of(with_layouts(item, plan)) for item in priced]
        steps = tuple(None if found is None else found.step_s for found in held)
        segments.append(Segment(plan=plan, first=at, last=at, step_s=steps))
    return Sweep(values=tuple(values), plans=plans, segments=tuple(segments))


def layouts_of(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """The layouts of the actor's two stages."""
    return tuple((str(a.model_stage), a.text, a.gpu_kind) for a in _actor(plan))


def _actor(plan: Plan) -> list[Assignment]:
    return [item for item in plan.assignments if item.model_stage.model is Model.ACTOR]


def with_layouts(priced: Priced, plan: Plan) -> Priced:
    """Only candidates with the plan's layouts of the actor; all else stays free."""
    kinds = priced.request.cluster.gpu_kinds
    for item in _actor(plan):
        rows = priced.set_of(item.model_stage)
        same = rows.has_cut(item.cut) & (rows.dp == item.dp)
        priced = priced.keep(
            item.model_stage, np.asarray(same & (rows.seat.pool == kinds.index(item.gpu_kind)))
        )
    request = replace(priced.request, placement=plan.arrangement.placement)
    return Priced(request=request, sets=priced.sets)


def with_response_length(request: PlanRequest, longest: float) -> PlanRequest:
    """Responses scaled so that the longest has this many tokens; the shape of their distribution stays."""
    given = request.workload.response
    factor = longest / given.maximum
    scaled = LengthDistribution(
        edges_tokens=tuple(edge * factor for edge in given.edges_tokens), shares=given.shares
    )
    return replace(request, workload=request.workload.with_response(scaled))


def with_prompt_length(request: PlanRequest, tokens: float) -> PlanRequest:
    """Prompts of this many tokens."""
    return replace(request, workload=replace(request.workload, prompt_tokens=round(tokens)))


def with_batch(request: PlanRequest, prompts: float) -> PlanRequest:
    """A step over this many prompts."""
    return replace(request, workload=replace(request.workload, num_prompts=round(prompts)))


CHANGES: dict[str, Change] = {
    "response-len": with_response_length,
    "prompt-len": with_prompt_length,
    "batch": with_batch,
}
