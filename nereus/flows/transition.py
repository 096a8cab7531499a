"""A transition of the running job as a subflow: what happens, in order.

plan ─▶ begin ─▶ operations, as their graph allows ─▶ vote ─▶ decide ─▶ apply ─▶ rebuild, unless aborted
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from nereus.emu.decision import Decision
from nereus.emu.stage import FromMemory, StageSpec
from nereus.errors import Infeasible, InvalidOperation, StateLost, explain
from nereus.flows import events
from nereus.flows.current import current_job, subflow_of
from nereus.flows.row_source import current_source
from nereus.planner.backoff import after_abort
from nereus.record.transitions import OperationRecord, TransitionRecord, append_transition
from nereus.tasks.counters import adam_steps
from nereus.tasks.fixed_options import fitted
from nereus.tasks.job import Job
from nereus.tasks.plan_move import plan_move
from nereus.tasks.planned_transition import Asked, Transition, asked_of
from nereus.tasks.stages import GENERATION, REWARD
from nereus.tasks.survive import on_survivors
from nereus.tasks.transition import Attempt, apply, begin, decide, operate, rebuild, vote
from nereus.tasks.transition_picture import draw

MAX_CONCURRENT = 16


def follow_plan(job: Job) -> None:
    """Move the job to the plan of its next step, if that is another one."""
    then = job.prepared.stages_at(job.state.step)
    if all(then[name].units == job.planned[name].units for name in then):
        return
    target: Mapping[str, StageSpec] = then
    if absent := {rank for spec in then.values() for rank in spec.ranks} - set(job.cluster.ranks):
        job.listener.on_message(
            f"the plan of step {job.state.step} names workers {sorted(absent)}, which are gone"
        )
        target = fitted(job, on_survivors(then, job.cluster.ranks, apart=job.config.runs_ahead))
    if move_to(job, target):
        job.planned = then


def move_to(job: Job, target: Mapping[str, StageSpec]) -> bool:
    """Move the job to `target`; whether it did.

    An aborted transition leaves the job under its old plan. The same target is then left out for 1, 2, 4, ...
    boundaries, unless the pool changes.
    """
    held = job.back_off
    if held is not None and held.holds_back(asked_of(target), job.cluster.pool(), job.state.step):
        job.listener.on_message(
            f"before step {job.state.step}: stays; the move was aborted {held.num_aborts} times and is tried "
            f"again before step {held.retry_step}"
        )
        return False
    job.target = target
    with subflow_of(job):
        return transition_flow(job.state.step).commits


@flow(
    name="transition",
    flow_run_name="transition before step {step}",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT),  # type: ignore[arg-type]
    validate_parameters=False,
)
def transition_flow(step: int) -> Decision:
    """Move the job to its target, between two steps."""
    job = current_job()
    assert job.target is not None, "somebody asked for the move"
    with ExitStack() as rest:
        while True:
            try:
                transition = plan_move(
                    job,
                    job.target,
                    before_asking=lambda draft: rest.enter_context(_generation_rests(job, draft)),
                )
            except (InvalidOperation, Infeasible) as error:
                decision = _refuse(job, asked_of(job.target), str(error))
                break
            rest.enter_context(_generation_rests(job, transition))
            decision = carry_out(job, transition)
            if not (transition.halfway and decision.commits):
                break
    if not decision.commits and not job.is_built:
        raise StateLost(
            explain(
                "a transition in two parts broke off after its first",
                values=decision.reason,
                rule="the units between the two are no plan to run under",
            )
        )
    return decision


def _refuse(job: Job, asked: Asked, reason: str) -> Decision:
    """A transition that cannot be planned, as one that was aborted before it began."""
    decision = job.cluster.coordinator.abort(job.cluster.next_epoch(), reason)
    _back_off(job, asked, decision)
    return decision


def carry_out(job: Job, transition: Transition) -> Decision:
    """Run a planned transition in the current flow run and record it.

    An abort leaves the job under its old plan; after one that leads halfway the job is not built. Raises
    StateLost when a move in bounded mode broke off, WorkerLost when a worker died on the way: before the
    decision the transition was aborted; after a commit the job's model-stages are the new ones, unbuilt.
    """
    started = time.perf_counter()
    before, counts = job.stages, adam_steps(job)
    attempt = Attempt(job, transition)
    picture = draw(job, transition, attempt.epoch)
    job.listener.on_message(f"before step {job.state.step}: {transition.text}")
    events.transition(job, "begun", attempt.epoch, transition.text, {"bytes": transition.bytes})
    try:
        with job.stage("move"):
            operations = run_operations(attempt)
        votes = vote.submit(attempt).result()
        decision = decide.submit(attempt, votes, counts).result()
        try:
            operations = sent_later(operations, apply.submit(attempt, decision).result())
            if decision.commits and not transition.halfway:
                with current_source().at_rest():  # all workers enter a new world
                    rebuild.submit(attempt).result()
                    tell_synced(job)
        finally:
            _back_off(job, transition.asked, decision)
            seconds = time.perf_counter() - started
            _record(job, transition, decision, before, operations, picture, seconds)
            outcome: events.Outcome = "committed" if decision.commits else "aborted"
            numbers = {"bytes": transition.bytes, "seconds": seconds}
            events.transition(job, outcome, attempt.epoch, decision.reason or transition.text, numbers)
    except BaseException:
        job.cluster.halt()  # the task runner waits for its threads; `reap` lifts it
        raise
    return decision


def tell_synced(job: Job) -> None:
    """Engines were built; those of generation that hold no weights of their own got the newest."""
    if not isinstance(job.stages[GENERATION].origin, FromMemory):
        current_source().advance(job.state, synced=True)


def _generation_rests(job: Job, transition: Transition) -> AbstractContextManager[None]:
    """Nothing, where the operations leave generation, its reward model and their workers alone: it runs on
    meanwhile.
    """
    touches = transition.halfway
    for name in {GENERATION, REWARD} & set(job.stages):
        now, then = job.stages[name], transition.stages[name]
        touches |= now.units != then.units or not set(now.ranks).isdisjoint(transition.movers)
    return current_source().at_rest() if touches else nullcontext()


def run_operations(attempt: Attempt) -> list[OperationRecord]:
    """Every operation as a task run that waits for its predecessors, in the order of the schedule."""
    begun = begin.submit(attempt)
    runs: dict[str, PrefectFuture[OperationRecord]] = {}
    for operation in attempt.transition.operations:
        earlier: list[PrefectFuture[Any]] = [runs[name] for name in operation.after]
        runs[operation.id] = operate.submit(
            attempt, operation.id, operation.text, wait_for=earlier or [begun], return_state=False
        )
    return [run.result() for run in runs.values()]


def sent_later(operations: list[OperationRecord], sent_bytes: Mapping[str, int]) -> list[OperationRecord]:
    """The operations with what those in bounded mode sent after the decision."""
    return [
        replace(operation, bytes=sent_bytes[operation.model_stage])
        if operation.carrier is None and operation.model_stage in sent_bytes
        else operation
        for operation in operations
    ]


def _back_off(job: Job, asked: Asked, decision: Decision) -> None:
    """After an abort, leave this plan out for a while."""
    if decision.commits:
        job.back_off = None
        return
    job.back_off = after_abort(
        job.back_off,
        asked,
        job.cluster.pool(),
        step=job.state.step,
        longest=job.config.transitions.longest_wait,
    )
    job.listener.on_message(
        f"before step {job.state.step}: the transition was aborted ({decision.reason.splitlines()[0]}); "
        f"not tried again before step {job.back_off.retry_step} while the pool stays as it is"
    )


def _record(
    job: Job,
    transition: Transition,
    decision: Decision,
    before: Mapping[str, StageSpec],
    operations: list[OperationRecord],
    picture: str,
    seconds: float,
) -> None:
    append_transition(
        job.config.run_folder,
        TransitionRecord(
            step=job.state.step,
            epoch=decision.epoch,
            outcome=decision.outcome.value,
            reason=decision.reason,
            seconds=seconds,
            bytes=transition.bytes,
            lower_bound=transition.lower_bound,
            before={name: spec.text for name, spec in before.items()},
            after={name: spec.text for name, spec in transition.stages.items()},
            operations=operations,
            picture=picture,
            bounded=sorted(transition.bounded),
            halfway=transition.halfway,
            spilled_bytes=transition.spilled_bytes,
            retry_step=None if job.back_off is None else job.back_off.retry_step,
        ),
    )
