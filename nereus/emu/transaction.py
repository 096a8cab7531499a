"""Transitions of live state that either happen or do not: prepare, vote, one decision, pointer swap.

    coordinator (driver)                      worker (each)                                  decision record
      epoch e ──────────────────────────────▶ begin
      rank plans of an operation ───────────▶ prepare: shadow buffers, exchange    (and again for every one)
                                 ◀─────────── done / why not (late and lost peers are named)
      all done ─────────────────────────────▶ vote yes / no
      all yes? ─────────────────────────────────────────────────────────────────────────────▶ commit | abort
                                              resolve: waits for it, asks again, never guesses ◀──┘
                                              commit: the pointers to live state move to the shadows
                                              abort:  the shadows are dropped

States of a worker: IDLE ─begin─▶ OPEN ─vote─▶ PREPARED ─commit─▶ IDLE, and by an abort from either to IDLE.
In OPEN it prepares operations, in the order in which they come; the first that fails fails the epoch, and
those that come after it are declined at once. In PREPARED both layouts exist and the old one still holds. A
worker that voted yes stays PREPARED until it reads the decision: it holds both states and waits, however long
that takes. After commit a death is a new transition from the surviving holders.

All workers of one operation are sent its orders before any worker is sent the next one's, so workers that
share two operations take them in one order and never wait for each other. Every operation has a channel of
its own.

A spill makes room for the operations that follow: a shard that the transition ends goes to host memory, is
read from there, and comes back on an abort (`host_copy`).

Bounded mode frees old storage while it moves, so nothing can be undone: its vote says only that all ranks are
connected, and the move runs after the decision. A replica that the plan keeps must survive it
(`coordinator.check_bounded`); a unit of which any rank lost its state is destroyed and extended anew from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from nereus.emu.arena import ShardState
from nereus.emu.ballot import Vote
from nereus.emu.decision import Decision, DecisionRecord, await_decision
from nereus.emu.executor import Executor
from nereus.emu.host_copy import HostCopy
from nereus.emu.layout import Rank, shard
from nereus.emu.orders import Applied, Lost, Moved, Order, Phase, SpillOrder
from nereus.emu.prepared import Prepared
from nereus.emu.rank_plan import RankPlan
from nereus.emu.tensor import ModelSpec
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit import Unit
from nereus.errors import InvalidOperation, TransportError, explain

# Makes the zeroed shard that an order's plan fills. Raises MemoryError or RuntimeError when there is no room.
Allocate = Callable[[Order], ShardState]


class _NoRoom(Exception):
    """The allocator refused; becomes a no vote or a lost unit."""


@contextmanager
def _room_to(attempt: str, *, asked: str = "", rule: str, remedy: str) -> Iterator[None]:
    """What the allocator refuses inside is _NoRoom, in these words; torch tells it by a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        values = f"{asked}{str(error).splitlines()[0]}"
        raise _NoRoom(explain(attempt, values=values, rule=rule, remedy=remedy)) from error


@dataclass(eq=False)
class Participant:
    """A worker's side. `live` maps a model-stage to the shard that counts; only commit changes it."""

    worker: Rank
    executor: Executor
    allocate: Allocate
    observe: Callable[[Phase], None] = lambda phase: None
    live: dict[str, ShardState] = field(default_factory=dict)
    epoch: int = 0
    control: str = ""
    _newest: int = 0
    _prepared: Prepared | None = None

    @property
    def undecided(self) -> int | None:
        """The epoch that waits for its decision, None when idle."""
        return None if self._prepared is None else self._prepared.epoch

    def begin(self, epoch: int) -> None:
        """Open an epoch. Nothing is allocated or moved yet.

        Raises InvalidOperation when an earlier epoch is undecided, or `epoch` is not a new one.
        """
        self._require_fresh(epoch)
        self._newest = epoch
        self._prepared = Prepared(epoch=epoch)
        self.observe(Phase.BEGUN)

    def prepare(self, order: Order, *, deadline_s: float) -> Moved:
        """Build one operation's new shard beside the old one; collective over the workers of its plan.

        Operations come in one order on all workers that share them. Never raises for what can go wrong on the
        way (no memory, a peer that is late or gone): the epoch has then failed, and the reason is returned.
        Raises InvalidOperation when no epoch is open, when the live shard is not the one planned for, or when
        an earlier operation of the epoch has the same target.
        """
        prepared = self._require_open(f"prepare {order.target}", order)
        prepared.orders.append(order)
        if prepared.reason:
            self._decline(prepared, order)
        return self._do(prepared, deadline_s, lambda deadline: self._move(order, prepared, deadline))

    def spill(self, order: SpillOrder, *, deadline_s: float) -> Moved:
        """Put a live shard into host memory until the decision, so that its device has room for new ones.

        Fails, and is refused, as `prepare` is.
        """
        prepared = self._require_open(f"spill {order.source}")
        return self._do(prepared, deadline_s, lambda deadline: self._spill(order, prepared, deadline))

    def _do(self, prepared: Prepared, deadline_s: float, work: Callable[[Deadline], Moved]) -> Moved:
        """Do a part of the epoch unless it has failed; the first failure fails it."""
        start = time.monotonic()
        prepared.deadline_s = deadline_s
        moved = Moved(worker=self.worker, epoch=prepared.epoch)
        if not prepared.reason:
            try:
                moved = work(Deadline.after(deadline_s))
                self.observe(Phase.MOVED)
            except (TransportError, _NoRoom) as error:
                prepared.reason = str(error)
                prepared.shadows.clear()
                self._withdraw(prepared)
        moved = replace(moved, reason=prepared.reason, seconds=time.monotonic() - start)
        prepared.done.append(moved)
        return moved

    def vote(self) -> Vote:
        """Say whether all operations of the open epoch are done; none may follow.

        Raises InvalidOperation when no epoch is open.
        """
        prepared = self._require_open("vote")
        if left := sorted(prepared.left_on_host):
            prepared.reason = prepared.reason or f"{', '.join(left)} was spilled, and nothing takes its place"
        vote = prepared.vote = Vote(
            worker=self.worker,
            epoch=prepared.epoch,
            yes=not prepared.reason,
            reason=prepared.reason,
            sent_bytes=sum(moved.sent_bytes for moved in prepared.done),
            prepare_s=sum(moved.seconds for moved in prepared.done),
        )
        self.observe(Phase.PREPARED)
        return vote

    def _move(self, order: Order, prepared: Prepared, deadline: Deadline) -> Moved:
        plan, old = order.plan, self._source(order, prepared)
        moved = Moved(worker=self.worker, epoch=prepared.epoch)
        if plan.mode == "bounded":
            self.executor.open(plan, epoch=prepared.epoch, deadline=deadline)
            return moved
        new = self._target(order, old)
        self.observe(Phase.ALLOCATED)
        sent_bytes = self._run(plan, old, new, prepared, deadline)
        if order.changes_target:
            prepared.shadows[order.target] = new
        return replace(moved, sent_bytes=sent_bytes)

    def _run(
        self,
        plan: RankPlan,
        old: ShardState | None,
        new: ShardState | None,
        prepared: Prepared,
        deadline: Deadline,
    ) -> int:
        """Move the bytes; returns how many were sent. Raises _NoRoom when buffers do not fit."""
        with _room_to(
            f"worker {self.worker} cannot move its shard of {plan.new or plan.old}",
            rule="buffers of what is on its way must fit beside old and new shards",
            remedy="free memory on this device",
        ):
            return self.executor.run(plan, old, new, epoch=prepared.epoch, deadline=deadline).sent_bytes

    def _spill(self, order: SpillOrder, prepared: Prepared, deadline: Deadline) -> Moved:
        state = self._held(order.source, order.model, order.unit)
        num_bytes = state.num_bytes
        with _room_to(
            f"worker {self.worker} cannot put its shard of {order.unit} into host memory",
            asked=f"{num_bytes} bytes; ",
            rule="the host holds what is spilled until the decision",
            remedy="free memory on the host",
        ):
            prepared.spilled[order.source] = HostCopy.take(state, self.executor.lanes, deadline)
        self.observe(Phase.SPILLED)
        return Moved(worker=self.worker, epoch=prepared.epoch, spilled_bytes=num_bytes)

    def _withdraw(self, prepared: Prepared) -> None:
        """Let the peers know now, not at the deadline: those connected, and those who wait to connect."""
        self.executor.transport.close(prepared.epoch, broken=True)
        for order in prepared.orders:
            self._decline(prepared, order)

    def _decline(self, prepared: Prepared, order: Order) -> None:
        plan = order.plan
        if self.worker in plan.ranks:
            # Without the store nobody can be told; the peers then wait until their deadline.
            with suppress(TransportError):
                self.executor.transport.decline(
                    epoch=prepared.epoch, digest=plan.digest, reason=prepared.reason
                )

    def _target(self, order: Order, old: ShardState | None) -> ShardState | None:
        """The shard that the plan fills: a fresh one, or the old one of a unit that is kept."""
        if order.plan.new is None or order.plan.new == order.plan.old:
            return None if order.plan.new is None else old
        with _room_to(
            f"worker {self.worker} has no memory for its shard of {order.plan.new}",
            rule="shadow mode holds the old and the new shard at once",
            remedy="use bounded mode, or free memory first",
        ):
            return self.allocate(order)

    def _source(self, order: Order, prepared: Prepared) -> ShardState | None:
        """The shard that the plan reads, where it lies now. Raises InvalidOperation when the live one is not
        the one planned for.
        """
        if order.plan.old is None:
            return None
        state = self._held(order.source, order.stored or order.model, order.plan.old)
        spilled = prepared.spilled.get(order.source)
        return state if spilled is None else spilled.state

    def _held(self, key: str, model: ModelSpec, unit: Unit) -> ShardState:
        state = self.live.get(key)
        if state is None or state.shard != shard(model, unit.layout, self.worker):
            raise _refused(
                f"worker {self.worker} cannot move {key} as planned",
                f"planned from {unit}, and it holds {'nothing' if state is None else 'another shard'}",
                "a plan starts from what is live",
            )
        return state

    def resolve(self, record: DecisionRecord, *, wait_s: float) -> Decision | None:
        """Wait for the decision of the prepared epoch and act on it; None after `wait_s` without one.

        None changes nothing: both layouts are kept, ask again. Raises InvalidOperation with nothing prepared.
        """
        prepared = self._require_prepared()
        decision = await_decision(record, prepared.epoch, wait_s=wait_s)
        if decision is not None:
            self.apply(decision)
        return decision

    def apply(self, decision: Decision) -> Applied:
        """Commit or abort the prepared epoch as decided; returns what bounded moves sent and lost.

        Deciding commit for a worker that voted no is a broken protocol and raises InvalidOperation.
        """
        prepared = self._require_prepared()
        if decision.epoch != prepared.epoch:
            raise _refused(
                f"worker {self.worker} cannot apply the decision of epoch {decision.epoch}",
                f"it has prepared epoch {prepared.epoch}",
                "a decision speaks of its own epoch alone",
            )
        return self._commit(prepared, decision) if decision.commits else self._abort(prepared)

    def _commit(self, prepared: Prepared, decision: Decision) -> Applied:
        if prepared.vote is None or not prepared.vote.yes:
            raise _refused(
                f"worker {self.worker} cannot commit epoch {prepared.epoch}",
                prepared.vote.reason if prepared.vote else "it has not voted",
                "commit needs every vote",
            )
        self.observe(Phase.COMMITTING)
        applied = self._move_bounded(prepared)
        # The swap: from here on the new layout holds in this process. No step below can fail half-way.
        for key, state in prepared.shadows.items():
            if state is None:
                self.live.pop(key, None)
            else:
                self.live[key] = state
        self.epoch, self.control, self._prepared = decision.epoch, decision.control, None
        self.observe(Phase.COMMITTED)
        self._release(decision.epoch, broken=bool(applied.lost))
        return applied

    def _move_bounded(self, prepared: Prepared) -> Applied:
        """Run the moves that free their source. One that fails leaves nothing of its state."""
        lost: list[Lost] = []
        sent_bytes: dict[str, int] = {}
        deadline = Deadline.after(prepared.deadline_s)
        for order in prepared.orders:
            plan, old = order.plan, self._source(order, prepared)
            if plan.mode != "bounded":
                continue
            try:
                new = self._target(order, old)
                sent_bytes[order.target] = self._run(plan, old, new, prepared, deadline)
                if order.changes_target:
                    prepared.shadows[order.target] = new
            except (TransportError, _NoRoom) as error:
                self.executor.transport.close(prepared.epoch, broken=True)
                if not order.changes_target:
                    continue
                kept = plan.new is not None and plan.new == plan.old
                prepared.shadows[order.target] = old if kept else None
                if not kept:
                    lost.append(Lost(key=order.target, reason=str(error).splitlines()[0]))
        return Applied(lost=tuple(lost), sent_bytes=sent_bytes)

    def _abort(self, prepared: Prepared) -> Applied:
        # First the pointers: whatever fails below, the old layout holds and nothing of the epoch is left.
        self._prepared = None
        prepared.shadows.clear()
        try:
            self.observe(Phase.ABORTING)
        finally:
            try:
                self._release(prepared.epoch, broken=True)
            finally:
                lost = self._put_back(prepared)
        self.observe(Phase.ABORTED)
        return Applied(lost=lost)

    def _put_back(self, prepared: Prepared) -> tuple[Lost, ...]:
        """Bring what was spilled back to the device; what does not come back is live no more."""
        lost: list[Lost] = []
        for key in prepared.spilled:
            del self.live[key]
        for key, copy in prepared.spilled.items():
            try:
                copy.put_back(self.executor.lanes, Deadline.after(prepared.deadline_s))
                self.live[key] = copy.vacated
            except (MemoryError, RuntimeError, OSError, TransportError) as error:
                lost.append(Lost(key=key, reason=str(error).splitlines()[0]))
        return tuple(lost)

    def _release(self, epoch: int, *, broken: bool) -> None:
        self.executor.transport.close(epoch, broken=broken)
        self.executor.pool.forget()

    def _require_open(self, doing: str, order: Order | None = None) -> Prepared:
        prepared = self._prepared
        if prepared is None or prepared.vote is not None:
            raise _refused(
                f"worker {self.worker} cannot {doing}",
                "no epoch was begun" if prepared is None else f"it has voted in epoch {prepared.epoch}",
                "an epoch is begun first, and the vote ends its preparation",
            )
        if order is not None and order.changes_target and order.target in prepared.targets:
            raise _refused(
                f"worker {self.worker} cannot {doing}",
                f"epoch {prepared.epoch} has prepared it already",
                "a worker is in one operation of a model-stage that moves bytes",
            )
        return prepared

    def _require_prepared(self) -> Prepared:
        if self._prepared is None:
            raise _refused(
                f"worker {self.worker} has nothing to decide",
                f"the last committed epoch is {self.epoch}",
                "an epoch is begun first",
            )
        return self._prepared

    def _require_fresh(self, epoch: int) -> None:
        if self._prepared is not None:
            raise _refused(
                f"worker {self.worker} cannot begin epoch {epoch}",
                f"epoch {self._prepared.epoch} is undecided",
                "one transition at a time: resolve the undecided one first",
            )
        if epoch <= self._newest:
            raise _refused(
                f"worker {self.worker} cannot begin epoch {epoch}",
                f"the newest epoch it has seen is {self._newest}",
                "epochs rise and are never used twice",
            )


def _refused(attempt: str, values: str, rule: str) -> InvalidOperation:
    return InvalidOperation(explain(attempt, values=values, rule=rule))
