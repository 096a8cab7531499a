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
from nereus.tasks.survive import on_survivors
from nereus.tasks.transition import Transition, decide_and_apply, move_and_vote, plan_transition, rebuild


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

    An abort leaves the job under its old plan. Raises what a worker raised when a step after the decision
    failed.
    """
    started = time.perf_counter()
    step, before = job.state.step, job.stages
    job.listener.on_message(f"before step {step}: {transition.text}")
    epoch = job.cluster.next_epoch()
    votes = move_and_vote.submit(job, transition, epoch).result()
    decision = decide_and_apply.submit(job, transition, epoch, votes).result()
    if decision.commits:
        rebuild.submit(job, transition).result()
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
            before={name: spec.text for name, spec in before.items()},
            after={name: spec.text for name, spec in transition.stages.items()},
        ),
    )
    return decision
