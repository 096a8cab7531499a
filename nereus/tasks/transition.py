"""A transition of the running job: from the model-stages as they are to those of another plan, in place.

    plan (pure) ─▶ begin ─▶ one task an operation ─▶ vote ─▶ one decision ─▶ apply ─▶ rebuild
                               │ fails                                          ▲
                               └──▶ the others give up, nobody votes ─▶ abort ──┘

Until the decision the old layout holds, and an abort leaves the job as it was; from the decision to commit on
the new one holds, built or not yet (I6). The orders of one operation reach all its workers before those of
the next reach any, and a worker takes them one by one: so workers that share operations take them in one
order, and the operation that was sent first can always go on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.emu.ballot import Vote
from nereus.emu.cluster import Call
from nereus.emu.decision import Decision
from nereus.emu.layout import Rank
from nereus.emu.stage import FromMemory, FromStage, StageSpec
from nereus.emu.transaction import Moved
from nereus.errors import WorkerLost
from nereus.record.transitions import OperationRecord
from nereus.tasks.control import control_record
from nereus.tasks.job import Job, build_stages
from nereus.tasks.stages import TRAINING
from nereus.tasks.transition_plan import PlannedOperation, Transition

DEADLINE_S = 600.0  # of one operation; a dead peer is noticed by its connection, much earlier


@dataclass(eq=False)
class Attempt:
    """One try at a transition. The first operation that fails makes all others give up."""

    epoch: int
    failed: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, reason: str) -> None:
        """Remember the first reason and wake whoever waits."""
        with self._lock:
            self.reason = self.reason or reason
        self.failed.set()


@task(name="begin", task_run_name="begin", cache_policy=NO_CACHE)
def begin(job: Job, transition: Transition, attempt: Attempt) -> None:
    """Open the epoch on every worker that has a part."""
    calls = dict.fromkeys(transition.movers, Call("begin_transition", (attempt.epoch,)))
    try:
        job.cluster.run(calls, what="begin")
    except WorkerLost as error:
        attempt.fail(str(error))


@task(name="operation", task_run_name="{operation.text}", cache_policy=NO_CACHE)
def operate(job: Job, attempt: Attempt, operation: PlannedOperation) -> OperationRecord:
    """Let the workers of one operation build their new shards beside the old ones.

    Sends nothing where another operation of its chain carries the bytes, or where the attempt has failed.
    """
    moved: Sequence[Moved] = ()
    if operation.orders and not attempt.failed.is_set():
        moved = _prepared(job, attempt, operation)
    return OperationRecord(
        id=operation.id,
        kind=operation.kind,
        model_stage=operation.model_stage,
        text=operation.text,
        after=list(operation.after),
        gpus=list(operation.ranks),
        bytes=sum(part.sent_bytes for part in moved),
        planned_bytes=operation.bytes,
        seconds=max((part.seconds for part in moved), default=0.0),
        carrier=operation.carrier,
        reason=next((part.reason for part in moved if part.reason), ""),
    )


def _prepared(job: Job, attempt: Attempt, operation: PlannedOperation) -> Sequence[Moved]:
    """What the workers answered, as far as they did before the attempt failed."""
    calls = {rank: Call("prepare_operation", (order, DEADLINE_S)) for rank, order in operation.orders.items()}
    pending = job.cluster.submit(calls)
    try:
        answers = job.cluster.wait(pending, what="move", until=attempt.failed)
    except WorkerLost as error:
        attempt.fail(str(error))
        return ()
    for part in answers.values():
        if part.reason:
            attempt.fail(part.reason)
    return list(answers.values())


@task(name="vote", task_run_name="vote", cache_policy=NO_CACHE)
def vote(job: Job, transition: Transition, attempt: Attempt) -> dict[Rank, Vote]:
    """Ask every worker that has a part whether it holds all of its new shards.

    Nobody is asked after a failure. A worker that died has no vote, which counts as a no.
    """
    if attempt.failed.is_set():
        return {}
    try:
        return job.cluster.run(dict.fromkeys(transition.movers, Call("vote")), what="vote")
    except WorkerLost:
        return {}


@task(name="decide", task_run_name="decide", cache_policy=NO_CACHE)
def decide(
    job: Job,
    transition: Transition,
    attempt: Attempt,
    votes: Mapping[Rank, Vote],
    counts: Mapping[str, int],
) -> Decision:
    """Write the one decision; where it is commit, the job's model-stages are the new ones from here on.

    `counts` are Adam's, by model-stage. Asks no worker, so nobody's death comes between votes and decision.
    """
    coordinator = job.cluster.coordinator
    if attempt.failed.is_set():
        return coordinator.abort(attempt.epoch, attempt.reason)
    control = control_record(job, counts)
    decision = coordinator.decide(attempt.epoch, transition.movers, votes, control.to_json())
    if decision.commits:
        job.is_built = False
        job.stages = {name: _moved(spec, transition, counts) for name, spec in transition.stages.items()}
    return decision


def _moved(spec: StageSpec, transition: Transition, counts: Mapping[str, int]) -> StageSpec:
    """Where a model-stage is built from after the commit: the shards in memory, or a weight sync."""
    if spec.name in transition.in_memory:
        return replace(spec, origin=FromMemory(step_count=counts.get(spec.name, 0)))
    return replace(spec, origin=FromStage(stage=TRAINING))


@task(name="apply", task_run_name="apply", cache_policy=NO_CACHE)
def apply(job: Job, transition: Transition, decision: Decision) -> None:
    """Let every worker that has a part act on the decision; all that live do, also when one is lost."""
    calls = dict.fromkeys(transition.movers, Call("apply_decision", (decision,)))
    job.cluster.run(calls, what="apply")


@task(name="rebuild", task_run_name="rebuild", cache_policy=NO_CACHE)
def rebuild(job: Job) -> None:
    """A new generation of the world, engines around the moved shards, and the weight sync of what was not."""
    with job.stage("rebuild"):
        job.cluster.join()
        job.weight_sync = build_stages(job.cluster, job.stages)
        job.is_built = True
