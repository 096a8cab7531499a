"""A transition of the running job as a subflow: what happens, in order.

plan ─▶ move and vote ─▶ decide ─▶ apply ─▶ rebuild with a weight sync        an abort ends it after apply
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from prefect import flow

from nereus.emu.decision import Decision
from nereus.emu.stage import StageSpec
from nereus.flows.current import current_job, subflow_of
from nereus.record.transitions import TransitionRecord, append_transition
from nereus.tasks.counters import adam_steps
from nereus.tasks.job import Job
from nereus.tasks.survive import on_survivors
from nereus.tasks.transition import Transition, apply, decide, move_and_vote, plan_transition, rebuild


def follow_plan(job: Job) -> None:
    """Move the job to the plan of its next step, if that is another one.

    An aborted transition leaves the job under its old plan; it is tried again before the next step.
    """
    then = job.prepared.stages_at(job.state.step)
    if all(then[name].units == job.planned[name].units for name in then):
        return
    with subflow_of(job):
        transition_flow(job.state.step)


@flow(name="transition", flow_run_name="transition before step {step}", validate_parameters=False)
def transition_flow(step: int) -> Decision:
    """Move the job to the plan of `step`, between two steps."""
    job = current_job()
    then = job.prepared.stages_at(step)
    if absent := {rank for spec in then.values() for rank in spec.ranks} - set(job.cluster.ranks):
        job.listener.on_message(f"the plan of step {step} names workers {sorted(absent)}, which are gone")
        then = on_survivors(then, job.cluster.ranks)
    decision = carry_out(job, plan_transition(job.stages, then))
    if decision.commits:
        job.planned = job.prepared.stages_at(step)
    return decision


def carry_out(job: Job, transition: Transition) -> Decision:
    """Run a planned transition in the current flow run and record it.

    An abort leaves the job under its old plan. Raises WorkerLost when a worker died on the way: before the
    decision the transition was aborted; after a commit the job's model-stages are the new ones, unbuilt.
    """
    started = time.perf_counter()
    before, counts = job.stages, adam_steps(job)
    job.listener.on_message(f"before step {job.state.step}: {transition.text}")
    epoch = job.cluster.next_epoch()
    votes = move_and_vote.submit(job, transition, epoch).result()
    decision = decide.submit(job, transition, epoch, votes, counts).result()
    try:
        apply.submit(job, transition, decision).result()
        if decision.commits:
            rebuild.submit(job).result()
    finally:
        _record(job, transition, decision, before, time.perf_counter() - started)
    return decision


def _record(
    job: Job, transition: Transition, decision: Decision, before: Mapping[str, StageSpec], seconds: float
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
        ),
    )
