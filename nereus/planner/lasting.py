"""Layouts that serve a job from its start to its end: tp and pp fixed once, for the longest answers to come.

People who train with a fixed tp and pp know the limit of their answers, and that running out of memory ends
the run; so they choose a cut that holds to the end, and let the number of units follow the GPUs.
"""

from __future__ import annotations

from dataclasses import replace

from nereus.errors import ConfigError
from nereus.planner.choose import best_of
from nereus.planner.clairvoyant import nodes_cluster, true_request
from nereus.planner.conditions import Conditions, Lengths, Trace
from nereus.planner.fixed import Choice, Fix
from nereus.planner.held import best, layout_fixes, priced, sizes_of
from nereus.planner.plan import Plan
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest

EVERY = 5
"""Of so many steps of a trace one is asked for its best plan: their lengths are much alike."""


def with_cuts(request: PlanRequest, plan: Plan, *, options: bool) -> PlanRequest:
    """The request with a plan's placement and its tp and pp of every model-stage, with `options` its
    micro-batches and recomputation, too; dp stays free.
    """
    fixes = (*request.fixed, *layout_fixes(sizes_of(plan), dp=False))
    if options:
        fixes += _option_fixes(plan)
    return replace(request, fixed=fixes, placement=plan.arrangement.placement)


def lasting_request(request: PlanRequest, trace: Trace, *, options: bool) -> PlanRequest:
    """The request with the cuts, and `options` as in `with_cuts`, that fit all of a trace, and of these are
    fastest at its start.

    Those that are best at some step, of every few, are compared. Where none fits everywhere, the one that
    fails at the fewest steps is taken.
    """
    largest, hardest, start = request.cluster, _hardest(trace), trace.steps[0]
    found: dict[object, Plan] = {}
    sampled = trace.steps[::EVERY]
    for step in sampled:
        plan = best(_asked(request, step, _num_nodes(step)), largest)
        if plan is not None:
            cut = with_cuts(request, plan, options=options)
            found.setdefault((cut.fixed, cut.placement), plan)

    def step_s(plan: Plan, step: Conditions, num_nodes: int) -> float:
        asked = _asked(request, step, num_nodes)
        same = _as_cut(asked, plan, largest) if not options else _best(with_cuts(asked, plan, options=True))
        return float("inf") if same is None else same.step_s

    def order(plan: Plan) -> tuple[int, float]:
        misses = sum(
            step_s(plan, step, nodes) == float("inf")
            for nodes, longest in hardest.items()
            if step_s(plan, longest, nodes) == float("inf")
            for step in sampled
            if _num_nodes(step) == nodes
        )
        return misses, step_s(plan, start, _num_nodes(start))

    chosen = min(found.values(), key=order, default=None)
    return request if chosen is None else with_cuts(request, chosen, options=options)


def _as_cut(asked: PlanRequest, plan: Plan, largest: ClusterProfile) -> Plan | None:
    """The best plan with the cuts of another; None where nothing fits."""
    chosen = priced(replace(asked, placement=plan.arrangement.placement), largest)
    for item in plan.assignments:
        rows = chosen.set_of(item.model_stage)
        chosen = chosen.keep(item.model_stage, (rows.tp == item.tp) & (rows.pp == item.pp))
    return best_of(chosen) if all(len(item.seat) for item in chosen.sets) else None


def _best(request: PlanRequest) -> Plan | None:
    """The best plan of a cut; None where nothing fits, or a unit needs more GPUs than there are."""
    try:
        return best(request)
    except ConfigError:
        return None


def _hardest(trace: Trace) -> dict[int, Conditions]:
    """By number of nodes, a step with the longest responses that occur on so many."""
    out: dict[int, Conditions] = {}
    for step in trace.steps:
        count = _num_nodes(step)
        lengths = step.lengths
        if count in out:
            other = out[count].lengths
            lengths = Lengths(
                mean=max(lengths.mean, other.mean),
                p95=max(lengths.p95, other.p95),
                maximum=max(lengths.maximum, other.maximum),
            )
        out[count] = replace(step, lengths=lengths)
    return out


def _num_nodes(step: Conditions) -> int:
    """The nodes on which the step ends."""
    return max(1, len(step.nodes - step.breaking or step.nodes))


def _asked(request: PlanRequest, step: Conditions, num_nodes: int) -> PlanRequest:
    return replace(true_request(request, step), cluster=nodes_cluster(request.cluster, num_nodes))


def _option_fixes(plan: Plan) -> tuple[Fix, ...]:
    """A plan's micro-batches and recomputation as fixed choices. Engines see to residency by themselves."""
    values = (
        (item.model_stage, choice, value)
        for item in plan.assignments
        for choice, value in (
            (Choice.MICRO_BATCH, item.option.micro_batch),
            (Choice.RECOMPUTE, item.option.recompute),
        )
    )
    return tuple(
        Fix(scope=str(stage), choice=choice, value=value)
        for stage, choice, value in values
        if value is not None
    )
