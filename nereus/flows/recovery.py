"""The emergency path: a job that loses workers goes on with those that are left.

    a worker dies ─▶ its peers' collectives fail ─▶ who is alive? ─▶ transition to them ─▶ the same again
                                                         ▲                   │
                                                         └── another dies ◀──┘

It holds for a step, a transition and a checkpoint. Stages of the step that had completed are not run again,
and optimizer steps that were applied are not applied again: no sample is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from prefect import flow

from nereus.emu.decision import Decision
from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.errors import NoSource, StageFailed, TransportError, WorkerLost
from nereus.flows.current import current_job, subflow_of
from nereus.flows.transition import carry_out
from nereus.tasks.adapt import seated_stages
from nereus.tasks.counters import stale_ranks
from nereus.tasks.job import Job
from nereus.tasks.restart import restart_from_storage
from nereus.tasks.survive import on_survivors
from nereus.tasks.transition_plan import plan_transition

ANSWER_S = 60.0  # beyond the longest wait in a collective: a worker that is silent still hangs
R = TypeVar("R")


def surviving(job: Job, act: Callable[[Job], R]) -> R:
    """Do `act`; while workers die on the way, move to the others and do it again.

    Raises what `act` or the recovery raised when nobody died.
    """
    gone: frozenset[Rank] = frozenset()
    while True:
        try:
            if gone:
                with subflow_of(job):
                    recovery_flow(job.state.step, sorted(gone))
            return act(job)
        except (WorkerLost, StageFailed, TransportError) as error:
            if job.cluster.stop.is_set():
                raise
            gone = job.cluster.reap(timeout_s=job.config.cluster.timeout_s + ANSWER_S)
            if not gone:
                raise
            job.listener.on_message(f"step {job.state.step}: workers {sorted(gone)} are gone ({error})")


@flow(name="recovery", flow_run_name="recovery in step {step}", validate_parameters=False)
def recovery_flow(step: int, gone: list[Rank]) -> Decision | None:
    """Move the job from the workers that are gone, lately those in `gone`, to those that are left.

    Where the last whole copy of a model is gone, or the move is aborted though everybody lives, all models
    are read from the newest checkpoint and the job goes back to its step; returns that move's decision, None
    where there was none to make. What was measured before says nothing about the plan from here on.
    """
    job = current_job()
    job.measured = None
    then = stages_of_survivors(job)
    held = {rank for spec in job.stages.values() for rank in spec.ranks}
    decision: Decision | None = None
    try:
        lost = frozenset(held - set(job.cluster.ranks)) | stale_ranks(job)
        decision = carry_out(job, plan_transition(job.stages, then, lost=lost))
        reason = decision.reason
    except NoSource as error:
        reason = str(error)
    if decision is None or not decision.commits:
        job.listener.on_message(f"going back to storage: {reason}")
        restart_from_storage(job, then)
    return decision


def stages_of_survivors(job: Job) -> Mapping[str, StageSpec]:
    """Where to go on: the best plan for who is left in a job that adapts, else the smallest change."""
    if job.adapter is None:
        return on_survivors(job.stages, job.cluster.ranks)
    return seated_stages(job.stages, job.adapter.without(job.cluster.pool(), job.state.step))
