"""What to do when nothing fits: what is short, and the smallest change with which a plan exists.

Every change that is proposed was planned with: none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nereus.errors import Infeasible, explain
from nereus.planner.candidate_set import problem_of
from nereus.planner.choose import Priced, best_of, best_plan
from nereus.planner.fixed import Choice
from nereus.planner.layouts import Space
from nereus.planner.lean import GB, leanest
from nereus.planner.plan import Plan
from nereus.planner.problem import Problem
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest, Turns
from nereus.planner.search import solve
from nereus.planner.workload import Recompute, Stage

_MOST_MEMORY = 16.0  # times the memory given
_MOST_NODES = 64  # times the nodes given; beyond that more GPUs are no small change


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change in words and the best plan with it."""

    change: str
    request: PlanRequest
    plan: Plan


def require_plan(priced: Priced) -> Plan:
    """The best plan. Raises Infeasible that says what is short and the smallest changes that help."""
    request, plan = priced.request, best_of(priced)
    if plan is None:
        raise Infeasible(
            explain(
                f"no plan fits {request.cluster.name}",
                values=shortage(priced),
                remedy="; or ".join(_said(remedy) for remedy in remedies(request))
                or "none was found among smaller micro-batches, recompute and more GPUs",
            )
        )
    return plan


def remedies(request: PlanRequest) -> tuple[Remedy, ...]:
    """The smallest change of the settings and the smallest growth of the cluster that make a plan exist."""
    found: list[Remedy] = []
    for change, changed in _smaller_changes(request):
        plan = best_plan(changed)
        if plan is not None:
            found.append(Remedy(change=change, request=changed, plan=plan))
            break
    grown = _more_nodes(request)
    return tuple(found) if grown is None else (*found, grown)


def shortage(priced: Priced) -> str:
    """What is short: a model-stage that fits no GPU, too few GPUs, or memory beside others."""
    request = priced.request
    for item in priced.sets:
        if not len(item.seat):
            if not item.cuts:
                return f"no layout of {item.model_stage} has the fixed sizes on this cluster"
            return f"{item.model_stage} {leanest(request, item.model_stage).text}"
    for stage in Stage if request.turns is Turns.NEVER else ():
        busy = [item for item in priced.sets if item.model_stage.stage is stage]
        fewest = [int(item.seat.gpus.min()) for item in busy]
        if sum(fewest) > request.cluster.num_gpus:
            names = ", ".join(f"{item.model_stage} {need}" for item, need in zip(busy, fewest, strict=True))
            return (
                f"{stage} runs {len(busy)} models side by side, at least {sum(fewest)} GPUs ({names}); "
                f"the cluster has {request.cluster.num_gpus}"
            )
    if request.workload.schedule.overlaps and (beside := _beside(priced)):
        return beside
    return _memory_shortage(priced)


def _beside(priced: Priced) -> str:
    """Where generation leaves too few GPUs to the stages that it runs beside; empty if it does not."""
    needs = {
        stage: sum(int(item.seat.gpus.min()) for item in priced.sets if item.model_stage.stage is stage)
        for stage in Stage
    }
    own, has = needs.pop(Stage.GENERATION), priced.request.cluster.num_gpus
    stage = max(needs, key=lambda each: needs[each])
    if own + needs[stage] <= has:
        return ""
    return (
        f"generation runs beside the other stages, on {own} GPUs of its own at least, and {stage} needs "
        f"{needs[stage]}; the cluster has {has}"
    )


def _memory_shortage(priced: Priced) -> str:
    """The least memory with which a plan would exist, as a multiple of what there is, by bisection."""
    ways = [problem_of(priced.request, priced.sets, way) for way in priced.request.arrangements]
    low, high = 1.0, _MOST_MEMORY
    if not any(_fits(problem, high) for problem in ways):
        return "the model-stages of one stage need more GPUs than there are where each of them fits"
    while high - low > 0.01:
        middle = (low + high) / 2
        fits = any(_fits(problem, middle) for problem in ways)
        low, high = (low, middle) if fits else (middle, high)
    usable = min(pool.limit_bytes for pool in ways[0].pools) / GB
    return (
        f"every model-stage fits by itself, but together they need about {high * usable:.1f} GB a GPU where "
        f"{usable:.1f} GB are usable"
    )


def _fits(problem: Problem, factor: float) -> bool:
    """Whether a plan exists when every pool has so many times its memory."""
    pools = tuple(replace(pool, limit_bytes=pool.limit_bytes * factor) for pool in problem.pools)
    return solve(replace(problem, pools=pools)) is not None


def _smaller_changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Changes of the settings, smallest first."""
    options = request.options
    without = {choice: tuple(fix for fix in request.fixed if fix.choice is not choice) for choice in Choice}
    if len(without[Choice.MICRO_BATCH]) < len(request.fixed) or 1 not in options.train_micro_batches:
        smaller = replace(
            options,
            train_micro_batches=tuple(sorted({1, *options.train_micro_batches})),
            score_micro_batches=tuple(sorted({1, *options.score_micro_batches})),
        )
        yield "a smaller micro-batch", replace(request, fixed=without[Choice.MICRO_BATCH], options=smaller)
    if len(without[Choice.RECOMPUTE]) < len(request.fixed) or Recompute.FULL not in options.recomputes:
        more = replace(options, recomputes=tuple({*options.recomputes, Recompute.FULL}))
        yield "full recompute of activations", replace(request, fixed=without[Choice.RECOMPUTE], options=more)
    fewer = tuple(sorted({1, 8, 32, *(size for size in options.max_residents if size is not None)}))
    yield (
        "fewer sequences held at once in generation",
        replace(
            request,
            fixed=without[Choice.MAX_RESIDENT],
            options=replace(options, max_residents=(*fewer, None)),
        ),
    )
    for fix in request.fixed:
        yield f"leaving {fix} free", replace(request, fixed=tuple(f for f in request.fixed if f is not fix))
    if request.share:
        yield "letting a model serve and train with two layouts", replace(request, share=frozenset())
    if request.turns is not Turns.AUTO:
        yield "letting models take turns on the same GPUs", replace(request, turns=Turns.AUTO)
    if request.placement is not None:
        yield "leaving the placement free", replace(request, placement=None)
    if request.space is Space.POW2:
        yield "the general space", replace(request, space=Space.GENERAL)
    if len(request.fixed) > 1:
        yield "leaving all fixed choices free", replace(request, fixed=())


def _more_nodes(request: PlanRequest) -> Remedy | None:
    """The fewest nodes with which a plan exists, every pool grown in proportion."""

    def attempt(nodes: int) -> Remedy | None:
        cluster = _grown(request.cluster, nodes)
        changed = replace(request, cluster=cluster)
        plan = best_plan(changed)
        if plan is None:
            return None
        return Remedy(change=f"{cluster.num_gpus} GPUs ({cluster.name})", request=changed, plan=plan)

    given = request.cluster.pools[0].num_nodes
    low, high, best = given, given, None
    while best is None and high < given * _MOST_NODES:
        low, high = high, high * 2
        best = attempt(high)
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        better = attempt(middle)
        low, high, best = (low, middle, better) if better is not None else (middle, high, best)
    return best


def _grown(cluster: ClusterProfile, nodes: int) -> ClusterProfile:
    """The cluster with `nodes` nodes in its first pool, the others in proportion."""
    factor = nodes / cluster.pools[0].num_nodes
    pools = tuple(
        replace(pool, num_nodes=max(pool.num_nodes, int(np.ceil(pool.num_nodes * factor))))
        for pool in cluster.pools
    )
    name = "+".join(f"{pool.num_nodes}x{pool.gpus_per_node}x{pool.gpu.name}" for pool in pools)
    return replace(cluster, pools=pools, name=name)


def _said(remedy: Remedy) -> str:
    chosen = []
    for item in remedy.plan.assignments:
        option = item.option
        if "micro-batch" in remedy.change and option.micro_batch is not None:
            chosen.append(f"{item.model_stage} micro_batch={option.micro_batch}")
        if "recompute" in remedy.change and option.recompute is not None:
            chosen.append(f"{item.model_stage} recompute={option.recompute}")
        if "sequences" in remedy.change and option.max_resident is not None:
            chosen.append(f"{item.model_stage} max_resident={option.max_resident}")
    detail = f" ({', '.join(chosen)})" if chosen else ""
    return f"{remedy.change}{detail}: {remedy.plan.step_s:.4g} s a step"
