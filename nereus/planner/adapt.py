"""The controller: between two steps, whether to plan again, what to move to, and whether that is worth it.

```
signals ─▶ held plan ─▶ trigger? ─▶ best plan on the GPUs that stay ─▶ transition's cost ─▶ admission
             (now)         │ no                │ the same                                    │      │
                           ▼                   ▼                                          refuse  admit
                          stay                stay                                         stay    move
```
Pure: `review` is a function of the plan in force, the signals and the history. A live job and a replay call
the same one; what it returns is carried out by whoever called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

from nereus.config.adaptation import Thresholds
from nereus.errors import ConfigError, Infeasible
from nereus.planner.admission import AdmissionPolicy, Decision, ProposedChange, judge, slowdown
from nereus.planner.choose import Priced
from nereus.planner.held import held, leaner, scaled
from nereus.planner.outlook import NOW, UNCHANGED, Near, Outlook, expected_s, rated
from nereus.planner.remedy import require_plan
from nereus.planner.request import PlanRequest
from nereus.planner.seating import Seated, seat, shapes_of
from nereus.planner.signals import Gpu, GpuId, SignalHistory, Signals
from nereus.planner.standstill import Way, standstill
from nereus.planner.transition_time import (
    FixedCosts,
    TransitionCost,
    lost_unchanged,
    serving_units,
    state_bytes,
    transition_cost,
)
from nereus.planner.triggers import Cause, Trigger, limits, trigger_of

Proposer = Callable[[PlanRequest, tuple[Gpu, ...], Seated | None], Seated]
"""From the request of now, the GPUs that stay and the plan in force to the plan to move to."""
SPAN_STEPS = 10.0
"""Steps between two crossings of the length's threshold, before two were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """What stays the same all along: the question as first asked, the thresholds, the policy, what a move
    costs.

    `request` gives the models, batch, space and the kind of the cluster; lengths, calibration and GPUs come
    from the signals. `propose` replaces the search by another source of plans (the oracle of a replay).
    `explains`: where nothing fits, say what would help, which is planned for. `in_segments`: generation that
    runs ahead draws responses in segments, so that its boundary is near.
    """

    request: PlanRequest
    policy: AdmissionPolicy
    thresholds: Thresholds
    costs: FixedCosts
    drain_margin_s: float = 30.0
    propose: Proposer | None = None
    explains: bool = True
    in_segments: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The outcome before one step. `seated` is the plan from here on: held with options of now, or the new
    one.

    `decision` is None where nothing was proposed; `cost` is the transition's where one was. `history` goes
    into the next review (after `with_transition`, where the caller has carried one out). `way` is how
    a move is carried out; a forced one waits for nothing.
    """

    seated: Seated
    history: SignalHistory
    trigger: Trigger | None = None
    decision: Decision | None = None
    cost: TransitionCost | None = None
    way: Way = Way.AT_ONCE

    @property
    def moves(self) -> bool:
        """Whether a transition is to be carried out."""
        return self.decision is not None and self.decision.admit


def first(controller: Controller, signals: Signals) -> tuple[Seated, SignalHistory]:
    """The plan to start with and the history that begins with it. Raises Infeasible when nothing fits."""
    lasting = signals.staying(signals.now_s + controller.drain_margin_s)
    seated = _proposed(controller, request_now(controller.request, signals), lasting, None)
    return seated, SignalHistory.start(signals, frozenset(gpu.id for gpu in lasting))


def on_survivors(
    controller: Controller, seated: Seated, signals: Signals, history: SignalHistory
) -> tuple[Seated, SignalHistory]:
    """The plan to go on with in the middle of a step, on the GPUs that are left, and the history after that.

    A loss of GPUs in use counts towards the rate that later plans are rated by. Raises Infeasible when
    nothing fits.
    """
    if gone := seated.in_use - signals.ids:
        history = history.with_loss(signals.step, len(gone)).with_crossing(Cause.LOST, signals.step)
    lasting = signals.staying(signals.now_s + controller.drain_margin_s)
    outlook = outlook_of(controller, history, signals.step)
    way = forced_way(controller, seated, signals, history)
    target = _proposed(controller, request_now(controller.request, signals), lasting, seated, outlook, way)
    usable = frozenset(gpu.id for gpu in lasting)
    return target, history.with_replan(signals, usable).settled()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedWay:
    """What the way to a plan costs that the job cannot do without: seconds for each of the steps that a plan
    has lasted on average.
    """

    controller: Controller
    before: Seated
    pool: tuple[Gpu, ...]
    factor: float
    steps: float

    @property
    def near(self) -> Near:
        """What is cheap to reach."""
        alive = frozenset(gpu.id for gpu in self.pool)
        return Near(plan=self.before.plan, lost=lost_unchanged(self.before, alive))

    def step_share_s(self, target: Seated) -> float:
        """Seconds a step."""
        workload, costs = self.controller.request.workload, self.controller.costs
        cost = transition_cost(self.before, target, self.pool, workload.models, workload.dtype, costs)
        return self.factor * cost.seconds / self.steps


def forced_way(
    controller: Controller, seated: Seated, signals: Signals, history: SignalHistory
) -> ForcedWay | None:
    """How ways are judged where the job has to move; None for a policy that does not look ahead."""
    if not controller.policy.looks_ahead:
        return None
    # As if one plan of the usual length had gone before: few changes so far tell little.
    changes = 1 + sum(map(len, history.crossings.values()))
    lasted = (SPAN_STEPS + signals.step - history.started_at) / changes
    return ForcedWay(
        controller=controller,
        before=seated,
        pool=signals.pool,
        factor=slowdown(history),
        steps=max(lasted, 1.0),
    )


def request_now(request: PlanRequest, signals: Signals) -> PlanRequest:
    """The request with lengths and calibration as they are now."""
    workload = request.workload.with_response(signals.response)
    return replace(request, workload=workload, calibration=signals.calibration)


def review(controller: Controller, seated: Seated, signals: Signals, history: SignalHistory) -> Review:
    """Decide before a step. Raises Infeasible when a change is forced and no plan fits the GPUs that stay."""
    request = request_now(controller.request, signals)
    now = held(seated, request)
    step_s = seated.plan.step_s if now is None else now.step_s
    lasting = signals.staying(signals.now_s + step_s + controller.drain_margin_s)
    usable = frozenset(gpu.id for gpu in lasting)
    thresholds = controller.thresholds
    history = history.observed(signals, limits(thresholds), thresholds.hysteresis)
    if gone := seated.in_use - signals.ids:
        history = history.with_loss(signals.step, len(gone))
    fresh = trigger_of(
        signals,
        history,
        thresholds,
        usable=usable,
        in_use=seated.in_use,
        fits=now is not None and _fits(seated, request, thresholds.headroom),
    )
    seated = seated if now is None else replace(seated, plan=now)
    trigger = fresh or _standing(controller.policy, signals.step, history)
    if trigger is None:
        return Review(seated=seated, history=history)
    if fresh is not None:
        history = history.with_crossing(fresh.cause, signals.step).with_replan(signals, usable)
    outlook = outlook_of(controller, history, signals.step)
    runs = now is not None and not trigger.cause.forces
    way = None if runs else forced_way(controller, seated, signals, history)
    target = _proposed(controller, request, lasting, seated, outlook, way)
    if same_units(seated, target):
        return Review(seated=seated, history=history.settled(), trigger=trigger)
    old_s, new_s = _expected(seated, target, request, outlook) if runs else (None, target.plan.step_s)
    return _weighed(controller, seated, target, signals, history, trigger, old_s, new_s)


def outlook_of(controller: Controller, history: SignalHistory, step: int) -> Outlook:
    """What plans are rated over: lengths until the next crossing, a forced move, the loss of a last copy."""
    if not controller.policy.looks_ahead:
        return NOW
    costs = controller.costs
    took = [switch.measured_s for switch in history.switches]
    move_s = median(took) if took else costs.transition_s
    intervals = history.intervals(Cause.LENGTH)
    return Outlook(
        factors=history.outlook(controller.thresholds.length),
        move_s=move_s / (fmean(intervals) if intervals else SPAN_STEPS),
        loss_s=max(costs.restart_s - move_s, 0.0) * history.loss_rate(step),
        read_s=_read_s(controller) * history.loss_rate(step),
        bursts=history.bursts,
    )


def _read_s(controller: Controller) -> float:
    """Seconds to read the largest model that does not change from storage."""
    workload = controller.request.workload
    sizes = state_bytes(workload.models, workload.dtype)
    return (
        max((sizes.get(stage, 0.0) for stage in UNCHANGED), default=0.0) / controller.costs.read_bytes_per_s
    )


def _standing(policy: AdmissionPolicy, step: int, history: SignalHistory) -> Trigger | None:
    """A reason to plan though no signal fired: a better plan that was refused, or the policy's own time."""
    # Only a policy that looks ahead changes its mind about a change as time goes by.
    if history.waiting_for is not None and policy.looks_ahead:
        since = history.waiting_since
        text = f"a better plan waits since step {since}"
        return Trigger(cause=Cause(history.waiting_for), text=text, numbers={"since": float(since or 0)})
    if policy.asks(step, history):
        return Trigger(cause=Cause.SCHEDULE, text=f"{policy.name} plans before step {step}", numbers={})
    return None


def _weighed(
    controller: Controller,
    seated: Seated,
    target: Seated,
    signals: Signals,
    history: SignalHistory,
    trigger: Trigger,
    old_step_s: float | None,
    new_step_s: float,
) -> Review:
    """Price the way, ask the policy, and note in the history what staying costs."""
    workload = controller.request.workload
    cost = transition_cost(seated, target, signals.pool, workload.models, workload.dtype, controller.costs)
    step_s = seated.plan.step_s
    still = standstill(
        cost.times(factor := slowdown(history)),
        seated.plan,
        moves_generation=serving_units(seated) != serving_units(target),
        in_segments=controller.in_segments,
    )
    next_change = signals.next_change_s(signals.now_s + step_s)
    change = ProposedChange(
        step=signals.step,
        trigger=trigger,
        old=seated.text,
        new=target.text,
        old_step_s=old_step_s,
        new_step_s=new_step_s,
        predicted_s=cost.seconds,
        hidden_s=max(0.0, factor * cost.seconds - still.seconds),
        steps_to_change=None if next_change is None else (next_change - signals.now_s) / step_s,
    )
    decision = judge(controller.policy, change, history)
    if decision.admit:
        way = Way.AT_ONCE if change.is_forced and still.way is Way.AT_SYNC else still.way
        return Review(seated=target, history=history, trigger=trigger, decision=decision, cost=cost, way=way)
    if change.gain_s > 0 and trigger.cause is not Cause.SCHEDULE:
        history = history.waiting(trigger.cause, signals.step, change.gain_s)
    else:
        history = history.settled()
    return Review(seated=seated, history=history, trigger=trigger, decision=decision, cost=cost)


def _proposed(
    controller: Controller,
    request: PlanRequest,
    pool: tuple[Gpu, ...],
    before: Seated | None,
    outlook: Outlook = NOW,
    way: ForcedWay | None = None,
) -> Seated:
    if controller.propose is not None:
        return controller.propose(request, pool, before)
    headroom = controller.thresholds.headroom
    return proposal(request, headroom, pool, before, outlook, way=way, explains=controller.explains)


def proposal(
    request: PlanRequest,
    headroom: float,
    pool: tuple[Gpu, ...],
    before: Seated | None,
    outlook: Outlook = NOW,
    *,
    way: ForcedWay | None = None,
    explains: bool = True,
) -> Seated:
    """The best plan over all shapes of the pool, seated. Raises Infeasible, saying what is short, if none
    fits.

    Best is the shortest expected step over the outlook, and where the job has to move, with the `way` there
    spread over the steps that a plan lasts. Plans that fit responses longer by `headroom` come first. Where
    nothing fits as asked, the options that take least memory are allowed as well (`leaner`).
    """
    shapes = shapes_of(pool, request.cluster)
    asked = [replace(request, cluster=shape.cluster) for shape in shapes]
    near = None if way is None else way.near
    try:
        ratings = [
            (rating, shape)
            for one, shape in zip(asked, shapes, strict=True)
            for rating in rated(one, request.cluster, headroom, outlook, near)
            or rated(leaner(one), request.cluster, headroom, NOW)
        ]
    except ConfigError as error:
        if len(pool) >= request.cluster.num_gpus:
            raise
        raise Infeasible(str(error)) from error  # a fixed layout needs more GPUs than are left
    if not ratings and not explains:
        raise Infeasible(f"no plan fits {asked[0].cluster.name}")
    if not ratings:
        require_plan(Priced.of(asked[0]))  # raises, saying what is short
    sizes = state_bytes(request.workload.models, request.workload.dtype)
    ordered = sorted(ratings, key=lambda pair: pair[0].order)
    found = seat(ordered[0][0].plan, ordered[0][1], before, sizes)
    if way is None or len(ordered) == 1:
        return found
    lacks_headroom, step_s = ordered[0][0].order
    least = step_s + way.step_share_s(found)
    for rating, shape in ordered[1:]:
        if rating.order >= (lacks_headroom, least):
            break
        other = seat(rating.plan, shape, before, sizes)
        total = rating.order[1] + way.step_share_s(other)
        if total < least:
            found, least = other, total
    return found


def _fits(seated: Seated, request: PlanRequest, headroom: float) -> bool:
    """Whether the plan in force fits longer responses."""
    return held(seated, scaled(request, 1 + headroom)) is not None


def _expected(one: Seated, other: Seated, request: PlanRequest, outlook: Outlook) -> tuple[float, float]:
    """Expected seconds a step of both plans over the outlook."""
    rows = [
        [None if plan is None else plan.step_s for plan in plans]
        for plans in (
            [held(seated, scaled(request, factor)) for factor in outlook.factors] for seated in (one, other)
        )
    ]
    least = [
        min((step for step in pair if step is not None), default=None) for pair in zip(*rows, strict=True)
    ]
    first_s, other_s = (
        expected_s(row, least, outlook) + outlook.risk_s(seated.plan, seated.cluster)
        for row, seated in zip(rows, (one, other), strict=True)
    )
    return first_s, other_s


def same_units(one: Seated, other: Seated) -> bool:
    """Whether two plans have the same units on the same GPUs, so that nothing has to move."""
    return _units(one) == _units(other)


def _units(seated: Seated) -> frozenset[tuple[str, str, tuple[int, ...], tuple[GpuId, ...]]]:
    return frozenset(
        (str(item.model_stage), item.text, item.layers, gpus)
        for item in seated.plan.assignments
        for gpus in seated.units(item)
    )
