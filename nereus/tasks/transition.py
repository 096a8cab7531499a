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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.emu.ballot import Vote
from nereus.emu.cluster import Call
from nereus.emu.decision import Decision
from nereus.emu.layout import Rank
from nereus.emu.orders import Applied, Moved
from nereus.emu.stage import FromMemory, FromStage, Origin, StageSpec
from nereus.errors import StateLost, WorkerLost, explain
from nereus.record.transitions import OperationRecord
from nereus.tasks.control import control_record
from nereus.tasks.device import device
from nereus.tasks.job import Job, build_stages
from nereus.tasks.planned_transition import PlannedOperation, Transition
from nereus.tasks.stages import TRAINING

DEADLINE_S = 600.0  # of one operation; a dead peer is noticed by its connection, much earlier


class Attempt:
    """One try at a transition of a job. The first operation that fails makes all others give up.

    Not a dataclass: Prefect looks for futures in every field of one that is passed to a task, through all
    plans, for 0.1 s of CPU an operation.
    """

    def __init__(self, job: Job, transition: Transition) -> None:
        self.job, self.transition = job, transition
        self.epoch = job.cluster.next_epoch()
        self.failed = threading.Event()
        self.reason = ""
        self._operations = {operation.id: operation for operation in transition.operations}
        self._lock = threading.Lock()

    def operation(self, operation_id: str) -> PlannedOperation:
        """The operation of that id."""
        return self._operations[operation_id]

    def fail(self, reason: str) -> None:
        """Remember the first reason and wake whoever waits."""
        with self._lock:
            self.reason = self.reason or reason
        self.failed.set()


@task(name="begin", task_run_name="begin", cache_policy=NO_CACHE)
def begin(attempt: Attempt) -> None:
    """Open the epoch on every worker that has a part."""
    calls = dict.fromkeys(attempt.transition.movers, Call("begin_transition", (attempt.epoch,)))
    try:
        attempt.job.cluster.run(calls, what="begin")
    except WorkerLost as error:
        attempt.fail(str(error))


@task(name="operation", task_run_name="{text}", cache_policy=NO_CACHE)
def operate(attempt: Attempt, operation_id: str, text: str) -> OperationRecord:
    """Let the workers of one operation build their new shards beside the old ones. `text` names the task run.

    Sends nothing where another operation of its chain carries the bytes, or where the attempt has failed; in
    bounded mode the workers only connect, and move when it is decided. A spill only makes room.
    """
    operation = attempt.operation(operation_id)
    moved: Sequence[Moved] = ()
    if operation.orders and not attempt.failed.is_set():
        moved = _prepared(attempt, operation)
    return OperationRecord(
        id=operation.id,
        kind=operation.kind,
        model_stage=operation.model_stage,
        text=text,
        after=list(operation.after),
        gpus=list(operation.ranks),
        bytes=sum(part.sent_bytes + part.spilled_bytes for part in moved),
        planned_bytes=operation.bytes,
        seconds=max((part.seconds for part in moved), default=0.0),
        carrier=operation.carrier,
        reason=next((part.reason for part in moved if part.reason), ""),
    )


def _prepared(attempt: Attempt, operation: PlannedOperation) -> Sequence[Moved]:
    """What the workers answered, as far as they did before the attempt failed."""
    method = "spill_shard" if operation.kind == "spill" else "prepare_operation"
    calls = {rank: Call(method, (order, DEADLINE_S)) for rank, order in operation.orders.items()}
    cluster = attempt.job.cluster
    pending = cluster.submit(calls)
    try:
        answers = cluster.wait(pending, what="move", until=attempt.failed)
    except WorkerLost as error:
        attempt.fail(str(error))
        return ()
    for part in answers.values():
        if part.reason:
            attempt.fail(part.reason)
    return list(answers.values())


@task(name="vote", task_run_name="vote", cache_policy=NO_CACHE)
def vote(attempt: Attempt) -> dict[Rank, Vote]:
    """Ask every worker that has a part whether it holds all of its new shards.

    Nobody is asked after a failure. A worker that died has no vote, which counts as a no.
    """
    if attempt.failed.is_set():
        return {}
    try:
        return attempt.job.cluster.run(dict.fromkeys(attempt.transition.movers, Call("vote")), what="vote")
    except WorkerLost:
        return {}


@task(name="decide", task_run_name="decide", cache_policy=NO_CACHE)
def decide(attempt: Attempt, votes: Mapping[Rank, Vote], counts: Mapping[str, int]) -> Decision:
    """Write the one decision; where it is commit, the job's model-stages are the new ones from here on.

    `counts` are Adam's, by model-stage. Asks no worker, so nobody's death comes between votes and decision.
    """
    job, transition = attempt.job, attempt.transition
    coordinator = job.cluster.coordinator
    if attempt.failed.is_set():
        return coordinator.abort(attempt.epoch, attempt.reason)
    control = control_record(job, counts)
    decision = coordinator.decide(attempt.epoch, transition.movers, votes, control.to_json())
    if decision.commits:
        job.is_built = False
        first = job.prepared.stages_at(job.state.step)
        job.stages = {
            name: replace(spec, origin=_origin(spec, first[name], transition, counts))
            for name, spec in transition.stages.items()
        }
    return decision


def _origin(spec: StageSpec, first: StageSpec, transition: Transition, counts: Mapping[str, int]) -> Origin:
    """Where a model-stage is built from after the commit: the shards in memory, a weight sync, or the folder
    that it was `first` read from.
    """
    if spec.name in transition.in_memory:
        return FromMemory(step_count=counts.get(spec.name, 0))
    return FromStage(stage=TRAINING) if spec.role == "generation" else first.origin


@task(name="apply", task_run_name="apply", cache_policy=NO_CACHE)
def apply(attempt: Attempt, decision: Decision) -> dict[str, int]:
    """Let every worker that has a part act on the decision; all that live do, also when one is lost.

    Returns what was sent in bounded mode, in bytes by model-stage. Raises StateLost when such a move broke
    off while everybody lives: the job is to recover, from the replica that it left alone.
    """
    calls = dict.fromkeys(attempt.transition.movers, Call("apply_decision", (decision,)))
    answers: Mapping[Rank, Applied] = attempt.job.cluster.run(calls, what="apply")
    lost = [(rank, one) for rank, applied in answers.items() for one in applied.lost]
    if lost:
        rank, first = lost[0]
        raise StateLost(
            explain(
                "a move in bounded mode broke off, or a shard did not come back from its host",
                values=f"{len(lost)} shards are lost; worker {rank} lost {first.key}: {first.reason}",
                rule="what has been freed must be filled anew; the replicas that were left alone are whole",
            )
        )
    sent: Counter[str] = Counter()
    for applied in answers.values():
        sent.update(applied.sent_bytes)
    return dict(sent)


@task(name="rebuild", task_run_name="rebuild", cache_policy=NO_CACHE)
def rebuild(attempt: Attempt) -> None:
    """A new generation of the world, engines around the moved shards, and the weight sync of what was not."""
    job = attempt.job
    with job.stage("rebuild"):
        job.cluster.join()
        job.weight_sync = build_stages(job.cluster, job.stages, device=device(job.config))
        job.is_built = True
