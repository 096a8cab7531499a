"""A transition of the running job as a subflow: what happens, in order.

plan ─▶ move and vote ─▶ decide, apply ─▶ rebuild ─▶ publish        an abort ends it after the decision
"""

from __future__ import annotations

import time

from prefect import flow

from nereus.emu.decision import Decision
from nereus.flows.current import current_job, subflow_of
from nereus.record.transitions import TransitionRecord, append_transition
from nereus.tasks.job import Job
from nereus.tasks.transition import (
    decide_and_apply,
    move_and_vote,
    plan_transition,
    rebuild,
)


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
    started = time.perf_counter()
    then = job.prepared.stages_at(step)
    transition = plan_transition(job.stages, then)
    job.listener.on_message(f"before step {step}: {transition.text}")
    epoch = job.cluster.next_epoch()
    votes = move_and_vote.submit(job, transition, epoch).result()
    decision = decide_and_apply.submit(job, transition, epoch, votes).result()
    if decision.commits:
        rebuild.submit(job, transition).result()
        job.planned = then
    append_transition(
        job.config.run_folder,
        TransitionRecord(
            step=step,
            epoch=epoch,
            outcome=decision.outcome.value,
            reason=decision.reason,
            seconds=time.perf_counter() - started,
            bytes=transition.bytes,
            lower_bound=transition.lower_bound,
            before={name: spec.text for name, spec in job.stages.items()},
            after={name: spec.text for name, spec in transition.stages.items()},
        ),
    )
    return decision
