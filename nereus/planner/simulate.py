"""Replay: a job over a trace with the cost model in the place of workers, and the live controller unchanged.

```
conditions of step k-1 ─▶ Signals ─▶ adapt.review ─▶ transition (priced, measured with noise)
conditions of step k ───────────────────────────────▶ the step itself: held plan, true lengths and speed
                      a node leaves in it ─▶ forced review between two stages, or the stage again ─▶ ...
```
The controller sees what a job would see: lengths and speed of the step before, and announced departures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nereus.errors import Infeasible
from nereus.planner.adapt import Controller, Review, first, review
from nereus.planner.admission import Decision
from nereus.planner.conditions import Conditions, Trace
from nereus.planner.held import held
from nereus.planner.interruption import interruption
from nereus.planner.occupancy import occupancy
from nereus.planner.plan import Plan
from nereus.planner.replay_run import Run, StepRow
from nereus.planner.seating import Seated
from nereus.planner.signals import Gpu, SignalHistory, Signals, Switch
from nereus.planner.workload import Stage

_REDONE = 0.5  # share of a step that is lost on average when memory runs out in the middle
_NOISE = 0.1  # relative deviation of a measured transition from its prediction
ControllerAt = Callable[[int], Controller]


@dataclass(slots=True)
class _Job:
    """The job as it stands in the middle of a replay."""

    controller: ControllerAt
    trace: Trace
    width: int
    rng: np.random.Generator
    seated: Seated | None = None
    history: SignalHistory | None = None
    decisions: tuple[Decision, ...] = ()
    transition_s: float = 0.0
    num_transitions: int = 0
    num_restarts: int = 0

    def clear(self) -> None:
        """Forget the last step's transitions."""
        self.decisions, self.transition_s, self.num_transitions, self.num_restarts = (), 0.0, 0, 0


def replay(controller: Controller | ControllerAt, trace: Trace, *, seed: int = 0, policy: str = "") -> Run:
    """Run a job over a trace. Deterministic for equal arguments.

    A function of the step may stand for the controller (the oracle's path). Where no plan fits, the job
    stalls for a step of the trace and later starts again from its checkpoint.
    """
    at = controller if callable(controller) else lambda step: controller
    pool = at(0).request.cluster.pools[0]
    job = _Job(
        controller=at,
        trace=trace,
        width=pool.gpus_per_node,
        rng=np.random.default_rng((seed, 4)),
    )
    rows = tuple(_step(job, number) for number in range(len(trace.steps)))
    return Run(policy=policy or at(0).policy.name, trace=trace.name, rows=rows)


def _step(job: _Job, number: int) -> StepRow:
    """One step of the trace, from the boundary before it."""
    job.clear()
    now = job.trace.steps[number]
    before = job.trace.steps[max(number - 1, 0)]
    redone_s = 0.0
    try:
        _decide(job, number, before, now.nodes, now.draining)
        step_s = _step_s(job, number)
        if step_s is None:  # longer responses than the last step's: out of memory in the middle
            redone_s += _REDONE * _known_s(job)
            _decide(job, number, now, now.nodes, now.draining)
            _require(_step_s(job, number))
        step_s, lost_s = _to_the_end(job, number)
        redone_s += lost_s
        stalled_s = 0.0
    except Infeasible:
        job.seated = None
        step_s, stalled_s = 0.0, job.trace.step_s
    return StepRow(
        step=number,
        step_s=step_s,
        transition_s=job.transition_s,
        redone_s=redone_s,
        stalled_s=stalled_s,
        num_gpus=len(now.nodes) * job.width,
        used_gpus=0 if job.seated is None else len(job.seated.in_use),
        length_mean=now.lengths.mean,
        compute=now.speed.compute,
        network=now.speed.network,
        plan="" if job.seated is None else job.seated.text,
        decisions=job.decisions,
        num_transitions=job.num_transitions,
        num_restarts=job.num_restarts,
    )


def _to_the_end(job: _Job, number: int) -> tuple[float, float]:
    """Run the step under the plan in force, and under others from where nodes leave in its middle; seconds
    of its stages, and of what was lost with nodes and done again.
    """
    now = job.trace.steps[number]
    step_s = lost_s = clock = 0.0
    num_done = 0
    for surprise in now.surprises:
        seated = _seated(job)
        taken = range(surprise.node * job.width, (surprise.node + 1) * job.width)
        if seated.in_use.isdisjoint(taken):
            continue
        parts_s = _stages_s(seated.plan)
        stop = interruption(
            [part / seated.plan.step_s for part in parts_s],
            surprise,
            num_done=num_done,
            clock=clock,
            margin=2 * job.controller(number).costs.transition_s / job.trace.step_s,
        )
        step_s += sum(parts_s[num_done : stop.num_done])
        lost_s += stop.lost * seated.plan.step_s
        num_done, clock = stop.num_done, stop.at
        _decide(job, number, now, *_pool_at(job, now, clock))
        _require(_step_s(job, number))
    return step_s + sum(_stages_s(_seated(job).plan)[num_done:]), lost_s


def _stages_s(plan: Plan) -> list[float]:
    """Seconds of the stages, all of them the step's; what is not a stage's own is shared out."""
    whole = sum(plan.stage_s.values())
    return [plan.stage_s[stage] * plan.step_s / whole for stage in Stage]


def _pool_at(
    job: _Job, now: Conditions, clock: float
) -> tuple[frozenset[int], tuple[tuple[int, float], ...]]:
    """Nodes that are left at this share of the step, and those that are known to go, after how long."""
    passed_s = clock * job.trace.step_s
    known = [(node, after_s - passed_s) for node, after_s in now.draining] + [
        (surprise.node, (surprise.gone - clock) * job.trace.step_s)
        for surprise in now.surprises
        if surprise.told <= clock
    ]
    gone = {node for node, after_s in known if after_s <= 0}
    gone |= {surprise.node for surprise in now.surprises if surprise.gone <= clock}
    return now.nodes - gone, tuple((node, after_s) for node, after_s in known if node not in gone)


def _decide(
    job: _Job,
    number: int,
    seen: Conditions,
    nodes: frozenset[int],
    draining: tuple[tuple[int, float], ...],
) -> None:
    """The boundary before a step, or the emergency in the middle of one; carries out what is decided."""
    controller = job.controller(number)
    signals = _signals(job, number, seen, nodes, draining)
    if job.seated is None or job.history is None:
        job.seated, history = first(controller, signals)
        if job.history is not None:  # after a stall
            job.transition_s += controller.costs.restart_s
            job.num_transitions += 1
            job.num_restarts += 1
            history = history.after(job.history)
        job.history = history
        return
    outcome = review(controller, job.seated, signals, job.history)
    job.seated, job.history = outcome.seated, outcome.history
    if outcome.decision is not None:
        job.decisions += (outcome.decision,)
    if outcome.moves:
        _move(job, number, outcome)


def _move(job: _Job, number: int, outcome: Review) -> None:
    """Carry out a transition: its measured time is the prediction with noise."""
    assert outcome.cost is not None, "a move has a cost"
    predicted_s = outcome.cost.seconds
    measured_s = predicted_s * float(np.exp(_NOISE * job.rng.standard_normal()))
    job.history = outcome.history.with_transition(
        Switch(step=number, predicted_s=predicted_s, measured_s=measured_s)
    )
    job.transition_s += measured_s
    job.num_transitions += 1
    job.num_restarts += outcome.cost.from_checkpoint is not None


def _signals(
    job: _Job,
    number: int,
    seen: Conditions,
    nodes: frozenset[int],
    draining: tuple[tuple[int, float], ...],
) -> Signals:
    now_s = number * job.trace.step_s
    # The trace counts in steps of its own length: what leaves within one leaves within one of the job's.
    scale = 1.0 if job.seated is None else job.seated.plan.step_s / job.trace.step_s
    leaves = {node: scale * after_s for node, after_s in draining}
    pool = tuple(
        Gpu(
            id=node * job.width + at,
            node=node,
            drain_s=now_s + leaves[node] if node in leaves else None,
        )
        for node in sorted(nodes)
        for at in range(job.width)
    )
    peaks = {} if job.seated is None else _peaks(job.seated)
    return Signals(
        step=number,
        now_s=now_s,
        response=seen.lengths.distribution,
        pool=pool,
        peak_memory_bytes=peaks,
        efficiency={"compute": seen.speed.compute, "network": seen.speed.network},
        calibration=seen.speed.calibration,
    )


def _peaks(seated: Seated) -> dict[int, int]:
    return {seated.gpus[rank]: group.total_bytes for group in occupancy(seated.plan) for rank in group.ranks}


def _step_s(job: _Job, number: int) -> float | None:
    """Seconds of the step under its true conditions; None when it does not fit."""
    now = job.trace.steps[number]
    request = job.controller(number).request
    truth = replace(
        request,
        workload=request.workload.with_response(now.lengths.distribution),
        calibration=now.speed.calibration,
    )
    seated = _seated(job)
    plan = held(seated, truth)
    if plan is None:
        return None
    job.seated = replace(seated, plan=plan)
    return plan.step_s


def _known_s(job: _Job) -> float:
    return _seated(job).plan.step_s


def _seated(job: _Job) -> Seated:
    assert job.seated is not None, "a step runs under a plan"
    return job.seated


def _require(step_s: float | None) -> float:
    if step_s is None:
        raise Infeasible("the plan that was chosen for these lengths does not fit them")
    return step_s
