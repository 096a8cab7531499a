"""A plan in force, priced for the work of now: layouts as they are, micro-batches and the like chosen anew.

A model-stage's own options (micro-batch, recomputation, sequences held at once) move no state, so a job sets
them again at every boundary. The search that made the plan chooses them, with every layout fixed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from nereus.planner.choose import Priced, best_of, best_plan
from nereus.planner.fixed import Choice, Fix
from nereus.planner.plan import Plan
from nereus.planner.problem import Seat
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest
from nereus.planner.seating import Seated
from nereus.planner.workload import ModelStage, Recompute, Workload

GRID = 1.03
"""Lengths that are looked ahead to lie this factor, or a power of it, from those of now."""
Sizes = tuple[tuple[ModelStage, int, int, int, int, int], ...]  # (tp, pp, dp, ep, cp) of a model-stage
_LAYOUT = (Choice.TP, Choice.PP, Choice.DP, Choice.EP, Choice.CP, Choice.GPUS, Choice.GPU, Choice.AVOID)


def priced(request: PlanRequest, largest: ClusterProfile | None = None) -> Priced:
    """A request's candidates, remembered: a job that drifts asks the same questions again and again.

    Candidates on `largest`, where that is the same kind of cluster with more nodes, are priced once for all
    smaller ones.
    """
    shared = request.cluster
    if largest is not None and _is_larger(largest, shared):
        shared = largest
    request = replace(request, workload=_plain(request.workload))
    sets = _priced(replace(request, cluster=shared, placement=None)).sets
    if shared is not request.cluster:
        room = request.cluster.num_gpus
        sets = tuple(item.take(np.flatnonzero(item.seat.gpus <= room)) for item in sets)
    return Priced(request=request, sets=sets)


@lru_cache(maxsize=512)
def _priced(request: PlanRequest) -> Priced:
    """Where generation runs changes no candidate, so that both placements share one pricing."""
    found = Priced.of(request)
    return Priced(request=found.request, sets=tuple(item.take(_useful(item.seat)) for item in found.sets))


def _useful(seat: Seat) -> NDArray[np.int64]:
    """Without options that are no faster than another of the same layout that takes no more memory."""
    order = np.lexsort((seat.latency_s, seat.transient_bytes, seat.persistent_bytes, seat.layout))
    if not len(order):
        return order
    same = (np.diff(seat.layout[order]) == 0) & (np.diff(seat.persistent_bytes[order]) == 0)
    group = np.concatenate(([0], np.cumsum(~same)))
    latency = seat.latency_s[order]
    low = np.full(len(order), np.inf)
    for back in range(1, len(order)):  # a group has as many rows as a stage has options: a few
        near = group[back:] == group[:-back]
        if not near.any():
            break
        low[back:] = np.where(near, np.minimum(low[back:], latency[:-back]), low[back:])
    return np.sort(order[latency < low])


def _is_larger(one: ClusterProfile, other: ClusterProfile) -> bool:
    """Whether a candidate of `other` costs the same on `one`: equal nodes and links, several in both."""
    if len(one.pools) != 1 or len(other.pools) != 1:
        return False
    nodes = (one.pools[0].num_nodes, other.pools[0].num_nodes)
    same = replace(other, name=one.name, pools=(replace(other.pools[0], num_nodes=nodes[0]),)) == one
    return same and nodes[0] >= nodes[1] > 1


@lru_cache(maxsize=16384)
def best(request: PlanRequest, largest: ClusterProfile | None = None) -> Plan | None:
    """The best plan of a request, remembered; None where nothing fits. `largest` as for `priced`."""
    return best_of(priced(request, largest))


def held(seated: Seated, request: PlanRequest) -> Plan | None:
    """The same layouts on the same ranks under the request's work; None where they do not fit.

    The plan stays on its own cluster; the request's serves as the `largest` of `priced`.
    """
    now = seated.plan
    asked = replace(request, cluster=seated.cluster, placement=now.arrangement.placement)
    found = with_layouts(asked, sizes_of(now), request.cluster)
    if found is None:
        return None
    ranks = {item.model_stage: item.ranks for item in now.assignments}
    return replace(
        found,
        assignments=tuple(replace(item, ranks=ranks[item.model_stage]) for item in found.assignments),
    )


def sizes_of(plan: Plan) -> Sizes:
    """(tp, pp, dp, ep, cp) of every model-stage."""
    return tuple((item.model_stage, item.tp, item.pp, item.dp, item.ep, item.cp) for item in plan.assignments)


@lru_cache(maxsize=65536)
def with_layouts(request: PlanRequest, sizes: Sizes, largest: ClusterProfile | None = None) -> Plan | None:
    """The best plan with these layouts; None where they do not fit. `largest` as for `priced`."""
    if max(prod(numbers) for _, *numbers in sizes) > request.cluster.num_gpus:
        return None
    chosen = priced(request, largest)
    for stage, tp, pp, dp, ep, cp in sizes:
        rows = chosen.set_of(stage)
        same = rows.has_cut((tp, pp, ep, cp)) & (rows.dp == dp)
        if not same.any():  # too big, or a dp that the space leaves out as no better than a smaller one
            return _with_fixes(request, sizes)
        chosen = chosen.keep(stage, same)
    return best_of(chosen)


def _with_fixes(request: PlanRequest, sizes: Sizes) -> Plan | None:
    others = tuple(fix for fix in request.fixed if fix.choice not in _LAYOUT)
    return best_plan(replace(request, fixed=others + layout_fixes(sizes)))


def layout_fixes(sizes: Sizes, *, dp: bool = True) -> tuple[Fix, ...]:
    """Layouts as fixed choices; without `dp` the number of units stays free."""
    choices = (Choice.TP, Choice.PP, Choice.DP, Choice.EP, Choice.CP)
    return tuple(
        Fix(scope=str(stage), choice=choice, value=value)
        for stage, *values in sizes
        for choice, value in zip(choices, values, strict=True)
        if dp or choice is not Choice.DP
    )


def leaner(request: PlanRequest) -> PlanRequest:
    """The request with the options that take least memory allowed too: micro-batches down to one, full
    recomputation, few sequences at once. What is fixed of the layouts stays fixed.
    """
    known = request.options
    residents = {size for size in known.max_residents if size is not None} | {32, 8, 1}
    options = replace(
        known,
        train_micro_batches=_halved(known.train_micro_batches),
        score_micro_batches=_halved(known.score_micro_batches),
        recomputes=tuple(dict.fromkeys((*known.recomputes, Recompute.FULL))),
        max_residents=(None, *sorted(residents, reverse=True)),
    )
    fixed = tuple(fix for fix in request.fixed if fix.choice in _LAYOUT)
    return replace(request, options=options, fixed=fixed)


def _halved(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, and the smallest of them halved again and again, down to one."""
    smallest = min(sizes)
    return tuple(sorted({*sizes, *(max(1, smallest >> power) for power in range(smallest.bit_length()))}))


@lru_cache(maxsize=4096)
def scaled(request: PlanRequest, factor: float) -> PlanRequest:
    """The request with all responses this many times as long, the factor rounded to a power of `GRID`."""
    power = round(math.log(factor) / math.log(GRID))
    if not power:
        return request
    given = request.workload.response
    edges = tuple(edge * GRID**power for edge in given.edges_tokens)
    return replace(request, workload=request.workload.with_response(replace(given, edges_tokens=edges)))


def _plain(workload: Workload) -> Workload:
    """Lengths to six digits, so that equal ones are equal however they were reached."""
    given = workload.response
    edges = tuple(float(f"{edge:.6g}") for edge in given.edges_tokens)
    return workload.with_response(replace(given, edges_tokens=edges))
