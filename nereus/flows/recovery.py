"""The emergency path: a step that loses workers goes on with those that are left.

    a worker dies ─▶ its peers' collectives fail ─▶ who is alive? ─▶ transition to them ─▶ step again

Stages that had completed are not run again, and optimizer steps that were applied are not applied again: no
sample is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefect import flow

from nereus.config import Tracking
from nereus.emu.decision import Decision
from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.errors import NoSource, StageFailed, TransportError, WorkerLost
from nereus.flows.current import current_job, subflow_of
from nereus.flows.step import tracked_step
from nereus.flows.transition import carry_out
from nereus.record.step import StepRecord
from nereus.tasks.adapt import seated_stages
from nereus.tasks.counters import stale_ranks
from nereus.tasks.job import Job
from nereus.tasks.restart import restart_from_storage
from nereus.tasks.survive import on_survivors
from nereus.tasks.transition import plan_transition

ANSWER_S = 60.0  # by then a worker's broken collective has failed; one that is silent still hangs


def surviving_step(job: Job, level: Tracking) -> StepRecord:
    """Run the next step; while workers die on the way, move to the others and go on.

    Raises what the stage raised when nobody died.
    """
    while True:
        try:
            return tracked_step(job, level)
        except (WorkerLost, StageFailed, TransportError) as error:
            if job.cluster.stop.is_set():
                raise
            gone = job.cluster.reap(timeout_s=ANSWER_S)
            if not gone:
                raise
            job.listener.on_message(f"step {job.state.step}: workers {sorted(gone)} are gone ({error})")
            with subflow_of(job):
                recovery_flow(job.state.step, sorted(gone))


@flow(name="recovery", flow_run_name="recovery in step {step}", validate_parameters=False)
def recovery_flow(step: int, gone: list[Rank]) -> Decision | None:
    """Move the job from the workers in `gone` to those that are left, profitable or not.

    Where the last whole copy of a model is gone, all models are read from the newest checkpoint and the job
    goes back to its step: then there is no decision.
    """
    job = current_job()
    then = stages_of_survivors(job)
    try:
        transition = plan_transition(job.stages, then, lost=frozenset(gone) | stale_ranks(job))
    except NoSource as error:
        job.listener.on_message(f"going back to storage: {error}")
        restart_from_storage(job, then)
        return None
    return carry_out(job, transition)


def stages_of_survivors(job: Job) -> Mapping[str, StageSpec]:
    """Where to go on: the best plan for who is left in a job that adapts, else the smallest change."""
    if job.adapter is None:
        return on_survivors(job.stages, job.cluster.ranks)
    return seated_stages(job.stages, job.adapter.without(job.cluster.pool(), job.state.step))
