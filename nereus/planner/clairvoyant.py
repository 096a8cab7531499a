"""The oracle's path: the best plan for every step with the whole trace known, by dynamic programming.

Options are the layouts that are best for some step of the trace. Between two steps an option is kept, or
another is taken for the price of a transition. What a step takes is priced as in the replay; a transition by
a closed form (its largest new training shard over the network, and the fixed costs), so the path is optimal
up to that estimate and to options that are best nowhere. The replay then pays the real transitions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nereus.planner.adapt import Controller, proposal
from nereus.planner.conditions import Conditions, Trace
from nereus.planner.held import Sizes, best, sizes_of, with_layouts
from nereus.planner.plan import Plan
from nereus.planner.policies.oracle import Oracle
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import Placement, PlanRequest
from nereus.planner.seating import Seated, seat, shapes_of
from nereus.planner.signals import Gpu
from nereus.planner.transition_time import state_bytes
from nereus.planner.workload import Stage

_OPTIONS_BY_SIZE = 6  # layouts kept for each number of nodes, the most often best ones
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Layouts that a job may have: for every model-stage, and whether generation has GPUs of its own."""

    sizes: Sizes
    placement: Placement
    num_gpus: int
    switch_s: float


def oracle_path(controller: Controller, trace: Trace) -> tuple[Option | None, ...]:
    """The option to hold during every step; None where none fits."""
    options = _options(controller, trace)
    cost = np.full((len(trace.steps), len(options)), np.inf)
    largest = controller.request.cluster
    for number, step in enumerate(trace.steps):
        room = len(step.nodes - step.breaking) * controller.request.cluster.pools[0].gpus_per_node
        truth = true_request(controller.request, step)
        for at, option in enumerate(options):
            if option.num_gpus <= room:
                asked = replace(truth, cluster=largest, placement=option.placement)
                plan = with_layouts(asked, option.sizes)
                cost[number, at] = np.inf if plan is None else plan.step_s
    chosen = _shortest(cost, np.array([option.switch_s for option in options]))
    return tuple(None if at is None else options[at] for at in chosen)


def oracle_controllers(controller: Controller, trace: Trace) -> tuple[Controller, ...]:
    """A controller for every step that proposes the path's plan and admits it."""
    width = controller.request.cluster.pools[0].gpus_per_node
    out = []
    for option, step in zip(oracle_path(controller, trace), trace.steps, strict=True):
        safe = tuple(
            Gpu(id=node * width + at, node=node)
            for node in sorted(step.nodes - step.breaking)
            for at in range(width)
        )
        truth = true_request(controller.request, step)
        out.append(replace(controller, policy=Oracle(), propose=_Turn(option, truth, safe)))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Proposes one option on the GPUs that last, whatever is asked; the best plan where it does not fit."""

    option: Option | None
    truth: PlanRequest
    safe: tuple[Gpu, ...]

    def __call__(self, request: PlanRequest, pool: tuple[Gpu, ...], before: Seated | None) -> Seated:
        lasting = tuple(gpu for gpu in pool if gpu.id in {gpu.id for gpu in self.safe}) or pool
        if self.option is not None:
            shape = shapes_of(lasting, request.cluster)[0]
            asked = replace(self.truth, cluster=shape.cluster, placement=self.option.placement)
            plan = with_layouts(asked, self.option.sizes, request.cluster)
            if plan is not None:
                sizes = state_bytes(request.workload.models, request.workload.dtype)
                return seat(plan, shape, before, sizes)
        return proposal(self.truth, 0.0, lasting, before, explains=False)


def true_request(request: PlanRequest, step: Conditions) -> PlanRequest:
    """The request under a step's true lengths and speed."""
    workload = request.workload.with_response(step.lengths.distribution)
    return replace(request, workload=workload, calibration=step.speed.calibration)


def nodes_cluster(cluster: ClusterProfile, num_nodes: int) -> ClusterProfile:
    """The cluster with another number of equal nodes."""
    pool = replace(cluster.pools[0], num_nodes=num_nodes)
    name = f"{num_nodes}x{pool.gpus_per_node}x{pool.gpu.name}"
    return replace(cluster, name=name, pools=(pool,))


def _options(controller: Controller, trace: Trace) -> list[Option]:
    by_nodes: dict[int, Counter[tuple[Sizes, Placement]]] = {}
    plans: dict[tuple[Sizes, Placement], Plan] = {}
    for step in trace.steps:
        for count in {len(step.nodes), len(step.nodes - step.breaking)} - {0}:
            asked = replace(
                true_request(controller.request, step),
                cluster=nodes_cluster(controller.request.cluster, count),
            )
            plan = best(asked, controller.request.cluster)
            if plan is not None:
                key = (sizes_of(plan), plan.arrangement.placement)
                plans[key] = plan
                by_nodes.setdefault(count, Counter())[key] += 1
    kept = {key for counter in by_nodes.values() for key, _ in counter.most_common(_OPTIONS_BY_SIZE)}
    return [
        Option(
            sizes=sizes,
            placement=placement,
            num_gpus=max(max(item.ranks) for item in plans[sizes, placement].assignments) + 1,
            switch_s=_switch_s(controller, plans[sizes, placement]),
        )
        for sizes, placement in sorted(kept, key=repr)
    ]


def _switch_s(controller: Controller, plan: Plan) -> float:
    """Closed form of a transition into a plan."""
    workload, link = controller.request.workload, controller.request.cluster.scale_out
    sizes = state_bytes(workload.models, workload.dtype)
    shard = max(
        sizes[item.model_stage] / (item.tp * item.pp * item.ep)
        for item in plan.assignments
        if item.model_stage.stage is Stage.TRAINING
    )
    return controller.costs.transition_s + shard / (link.bandwidth_Bps * link.efficiency)


def _shortest(cost: Floats, switch_s: Floats) -> list[int | None]:
    """The option by step that minimises step times plus switches; None at steps where none fits."""
    num_steps, num_options = cost.shape
    if not num_options:
        return [None] * num_steps
    total = np.zeros(num_options)
    came = np.zeros((num_steps, num_options), dtype=np.int64)
    for step in range(num_steps):
        stay = np.arange(num_options)
        cheapest = int(np.argmin(total))
        moved = total[cheapest] + switch_s
        came[step] = stay if step == 0 else np.where(total <= moved, stay, cheapest)
        total = total if step == 0 else np.minimum(total, moved)
        stalled = not np.isfinite(cost[step]).any()
        total = total + (0.0 if stalled else cost[step])
    at = int(np.argmin(total))
    path: list[int | None] = []
    for step in reversed(range(num_steps)):
        path.append(at if np.isfinite(cost[step, at]) else None)
        at = int(came[step, at])
    return path[::-1]
