"""The emergency path: a job that loses workers goes on with those that are left.

    a worker dies ─▶ its peers' collectives fail ─▶ who is alive? ─▶ transition to them ─▶ the same again
                                                         ▲                   │ the last replica was lost
                                                         └── another dies ◀──┤
                                                                             ▼
                                                     copies on peers, else storage: back to their step

It holds for a step, a transition and a checkpoint. Stages of the step that had completed are not run again,
and optimizer steps that were applied are not applied again: no sample is lost or counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from prefect import flow

from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.errors import (
    Infeasible,
    InvalidOperation,
    NoSource,
    StageFailed,
    StateLost,
    TransportError,
    WorkerLost,
)
from nereus.flows import events
from nereus.flows.current import current_job, subflow_of
from nereus.flows.row_source import current_source
from nereus.flows.transition import carry_out
from nereus.record.emergencies import EmergencyRecord, Way, append_emergency
from nereus.tasks.adapt import seated_stages
from nereus.tasks.counters import stale_states
from nereus.tasks.fixed_options import fitted
from nereus.tasks.job import Job
from nereus.tasks.peer_copy import go_back_to_copies
from nereus.tasks.plan_move import plan_move
from nereus.tasks.restart import restart_from_storage
from nereus.tasks.survive import on_survivors

ANSWER_S = 60.0  # beyond the longest wait in a collective: a worker that is silent still hangs
MOST_ATTEMPTS = 3  # at an emergency in which nobody is gone
R = TypeVar("R")


def surviving(job: Job, act: Callable[[Job], R]) -> R:
    """Do `act`; while workers die on the way, move to the others and do it again.

    Raises what `act` or the recovery raised when nobody died.
    """
    emergency: _Emergency | None = None
    while True:
        try:
            if emergency is not None:
                with current_source().at_rest(), subflow_of(job):
                    way = recovery_flow(job.state.step, sorted(emergency.gone))
                    current_source().recover()
                emergency.record(job, way)
                emergency = None
            return act(job)
        except (WorkerLost, StageFailed, TransportError, StateLost) as error:
            if job.cluster.stop.is_set():
                raise
            emergency = emergency or _Emergency(step=job.state.step, reason=str(error))
            gone = job.cluster.reap(timeout_s=job.config.cluster.timeout_s + ANSWER_S)
            if not gone and not (isinstance(error, StateLost) and emergency.attempts < MOST_ATTEMPTS):
                raise
            emergency.gone |= gone
            emergency.attempts += 1
            events.pool_changed(job, "shrank", gone, "workers died")
            told = f"workers {sorted(gone)} are gone" if gone else "state is lost"
            job.listener.on_message(f"step {job.state.step}: {told} ({error})")


@dataclass(kw_only=True)
class _Emergency:
    """One emergency while it lasts, deaths in its recovery included."""

    step: int
    reason: str
    began_s: float = field(default_factory=time.perf_counter)
    gone: frozenset[Rank] = frozenset()
    attempts: int = 0

    def record(self, job: Job, way: Way) -> None:
        """The job can go on."""
        record = EmergencyRecord(
            step=self.step,
            gone=sorted(self.gone),
            way=way,
            attempts=self.attempts,
            seconds=time.perf_counter() - self.began_s,
            steps_redone=self.step - job.state.step,
            reason=self.reason,
        )
        append_emergency(job.config.run_folder, record)
        redone = f", back to step {job.state.step}" if record.steps_redone else ""
        job.listener.on_message(f"step {self.step}: goes on by {way} after {record.seconds:.1f} s{redone}")


@flow(name="recovery", flow_run_name="recovery in step {step}", validate_parameters=False)
def recovery_flow(step: int, gone: list[Rank]) -> Way:
    """Move the job from the workers that are gone, those in `gone`, to those that are left; returns how.

    Where the last replica of a model is gone, or the move is aborted though everybody lives, all models go
    back to the newest copies in the memory of peers, else to the newest checkpoint. What was measured before
    says nothing about the plan from here on.
    """
    job = current_job()
    job.measured = None
    then = stages_of_survivors(job)
    reason = not_moved(job, then)
    if not reason:
        return Way.TRANSITION
    if go_back_to_copies(job, then):
        job.listener.on_message(f"went back to the copies on peers: {reason}")
        return Way.PEER_COPY
    job.listener.on_message(f"going back to storage: {reason}")
    restart_from_storage(job, then)
    return Way.STORAGE


def not_moved(job: Job, then: Mapping[str, StageSpec]) -> str:
    """Move to `then` from what live workers hold that is of worth; returns why that was not possible, or
    nothing.
    """
    while True:
        try:
            transition = plan_move(job, then, stale=stale_states(job))
        except (NoSource, InvalidOperation, Infeasible) as error:
            return str(error)
        decision = carry_out(job, transition)
        if not decision.commits:
            return decision.reason
        if not transition.halfway:
            return ""


def stages_of_survivors(job: Job) -> Mapping[str, StageSpec]:
    """Where to go on: the best plan for who is left in a job that adapts, else the smallest change, with less
    at once where memory asks for that.
    """
    if job.adapter is None:
        return fitted(job, on_survivors(job.stages, job.cluster.ranks, apart=job.config.runs_ahead))
    return seated_stages(job.stages, job.adapter.without(job.cluster.pool(), job.state.step))
