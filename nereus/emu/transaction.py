"""Transitions of live state that either happen or do not: prepare, vote, one decision, pointer swap.

    coordinator (driver)                      worker (each)                                  decision record
      epoch e, rank plans  ─────────────────▶ prepare: shadow buffers, exchange
                           ◀───────────────── vote yes / no (late and lost peers are named)
      all yes? ─────────────────────────────────────────────────────────────────────────────▶ commit | abort
                                              resolve: waits for it, asks again, never guesses ◀──┘
                                              commit: the pointers to live state move to the shadows
                                              abort:  the shadows are dropped

States of a worker: IDLE ─prepare─▶ PREPARED ─commit / abort─▶ IDLE. In PREPARED both layouts exist and the
old one still holds. A worker that voted yes stays PREPARED until it reads the decision: it holds both states
and waits, however long that takes. After commit a death is a new transition from the surviving holders.

Bounded mode frees old storage while it moves, so nothing can be undone: its vote says only that all ranks are
connected, and the move runs after the decision. A replica that the plan keeps must survive it
(`coordinator.check_bounded`); a unit of which any rank lost its state is destroyed and extended anew from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from nereus.emu.arena import ShardState
from nereus.emu.ballot import Vote
from nereus.emu.decision import Decision, DecisionRecord, await_decision
from nereus.emu.executor import Executor
from nereus.emu.layout import Rank, shard
from nereus.emu.rank_plan import RankPlan
from nereus.emu.tensor import ModelSpec
from nereus.emu.transport.protocol import Deadline
from nereus.errors import InvalidOperation, TransportError, explain


class Phase(StrEnum):
    """Where a worker is in a transition; reported to the participant's observer."""

    BEGUN = "begun"
    ALLOCATED = "allocated"
    MOVED = "moved"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One model-stage's part of a transition for one worker: which state becomes which, by which plan.

    `source` and `target` are equal for a change of layout; they differ for a weight sync.
    """

    source: str
    target: str
    model: ModelSpec
    plan: RankPlan


# Makes the zeroed shard that an order's plan fills. Raises MemoryError or RuntimeError when there is no room.
Allocate = Callable[[Order], ShardState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A state that a bounded move broke off in the middle: its unit must be destroyed and extended anew."""

    key: str
    reason: str


class _NoRoom(Exception):
    """The allocator refused; becomes a no vote or a lost unit."""


@dataclass(eq=False)
class _Prepared:
    epoch: int
    orders: tuple[Order, ...] = ()
    shadows: dict[str, ShardState | None] = field(default_factory=dict)
    vote: Vote | None = None
    deadline_s: float = 0.0


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
    _prepared: _Prepared | None = None

    @property
    def undecided(self) -> int | None:
        """The epoch that waits for its decision, None when idle."""
        return None if self._prepared is None else self._prepared.epoch

    def prepare(self, epoch: int, orders: Sequence[Order], *, deadline_s: float) -> Vote:
        """Build the new shards beside the old ones; collective over the workers of each plan.

        `orders` come in one order on all workers. Never raises for what can go wrong on the way (no memory, a
        peer that is late or gone): the vote is then no, and says why. Raises InvalidOperation when an earlier
        epoch is undecided, `epoch` is not a new one, or a live shard is not the one planned for.
        """
        self._require_fresh(epoch)
        start = time.monotonic()
        self._newest = epoch
        prepared = self._prepared = _Prepared(epoch=epoch, orders=tuple(orders), deadline_s=deadline_s)
        sent = 0
        reason = ""
        try:
            self.observe(Phase.BEGUN)
            deadline = Deadline.after(deadline_s)
            for order in orders:
                sent += self._move(order, prepared, deadline)
            self.observe(Phase.MOVED)
        except (TransportError, _NoRoom) as error:
            reason = str(error)
        if reason:
            prepared.shadows.clear()
            self._withdraw(prepared, reason)
        vote = prepared.vote = Vote(
            worker=self.worker,
            epoch=epoch,
            yes=not reason,
            reason=reason,
            sent_bytes=sent,
            prepare_s=time.monotonic() - start,
        )
        self.observe(Phase.PREPARED)
        return vote

    def _move(self, order: Order, prepared: _Prepared, deadline: Deadline) -> int:
        plan, old = order.plan, self._source(order)
        if plan.mode == "bounded":
            self.executor.open(plan, epoch=prepared.epoch, deadline=deadline)
            return 0
        new = self._target(order, old)
        self.observe(Phase.ALLOCATED)
        report = self.executor.run(plan, old, new, epoch=prepared.epoch, deadline=deadline)
        prepared.shadows[order.target] = new
        return report.sent_bytes

    def _withdraw(self, prepared: _Prepared, reason: str) -> None:
        """Let the peers know now, not at the deadline: those connected, and those who wait to connect."""
        transport = self.executor.transport
        transport.close(prepared.epoch, broken=True)
        for order in prepared.orders:
            if self.worker in order.plan.ranks:
                # Without the store nobody can be told; the peers then wait until their deadline.
                with suppress(TransportError):
                    transport.decline(epoch=prepared.epoch, digest=order.plan.digest, reason=reason)

    def _target(self, order: Order, old: ShardState | None) -> ShardState | None:
        """The shard that the plan fills: a fresh one, or the old one of a unit that is kept."""
        if order.plan.new is None or order.plan.new == order.plan.old:
            return None if order.plan.new is None else old
        try:
            return self.allocate(order)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when it cannot allocate
            raise _NoRoom(
                explain(
                    f"worker {self.worker} has no memory for its shard of {order.plan.new}",
                    values=str(error).splitlines()[0],
                    rule="shadow mode holds the old and the new shard at once",
                    remedy="use bounded mode, or free memory first",
                )
            ) from error

    def _source(self, order: Order) -> ShardState | None:
        """The live shard that the plan reads. Raises InvalidOperation when it is not the one planned for."""
        plan = order.plan
        if plan.old is None:
            return None
        state = self.live.get(order.source)
        if state is None or state.shard != shard(order.model, plan.old.layout, plan.rank):
            raise _refused(
                f"worker {self.worker} cannot move {order.source} as planned",
                f"planned from {plan.old}, and it holds {'nothing' if state is None else 'another shard'}",
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

    def apply(self, decision: Decision) -> tuple[Lost, ...]:
        """Commit or abort the prepared epoch as decided; returns what a bounded move lost.

        Deciding commit for a worker that voted no is a broken protocol and raises InvalidOperation.
        """
        prepared = self._require_prepared()
        if decision.epoch != prepared.epoch:
            raise _refused(
                f"worker {self.worker} cannot apply the decision of epoch {decision.epoch}",
                f"it has prepared epoch {prepared.epoch}",
                "a decision speaks of its own epoch alone",
            )
        if decision.commits:
            return self._commit(prepared, decision)
        self._abort(prepared)
        return ()

    def _commit(self, prepared: _Prepared, decision: Decision) -> tuple[Lost, ...]:
        if prepared.vote is None or not prepared.vote.yes:
            raise _refused(
                f"worker {self.worker} cannot commit epoch {prepared.epoch}",
                prepared.vote.reason if prepared.vote else "it has not voted",
                "commit needs every vote",
            )
        self.observe(Phase.COMMITTING)
        lost = tuple(self._move_bounded(prepared))
        # The swap: from here on the new layout holds in this process. No step below can fail half-way.
        for key, state in prepared.shadows.items():
            if state is None:
                self.live.pop(key, None)
            else:
                self.live[key] = state
        self.epoch, self.control, self._prepared = decision.epoch, decision.control, None
        self.observe(Phase.COMMITTED)
        self._release(decision.epoch, broken=bool(lost))
        return lost

    def _move_bounded(self, prepared: _Prepared) -> Iterable[Lost]:
        """Run the moves that free their source. One that fails leaves nothing of its state."""
        deadline = Deadline.after(prepared.deadline_s)
        for order in prepared.orders:
            plan, old = order.plan, self._source(order)
            if plan.mode != "bounded":
                continue
            try:
                new = self._target(order, old)
                self.executor.run(plan, old, new, epoch=prepared.epoch, deadline=deadline)
                prepared.shadows[order.target] = new
            except (TransportError, _NoRoom) as error:
                self.executor.transport.close(prepared.epoch, broken=True)
                kept = plan.new is not None and plan.new == plan.old
                prepared.shadows[order.target] = old if kept else None
                if not kept:
                    yield Lost(key=order.target, reason=str(error).splitlines()[0])

    def _abort(self, prepared: _Prepared) -> None:
        # First the pointers: whatever fails below, the old layout holds and nothing of the epoch is left.
        self._prepared = None
        prepared.shadows.clear()
        try:
            self.observe(Phase.ABORTING)
        finally:
            self._release(prepared.epoch, broken=True)
        self.observe(Phase.ABORTED)

    def _release(self, epoch: int, *, broken: bool) -> None:
        self.executor.transport.close(epoch, broken=broken)
        self.executor.pool.forget()

    def _require_prepared(self) -> _Prepared:
        if self._prepared is None:
            raise _refused(
                f"worker {self.worker} has nothing to decide",
                f"the last committed epoch is {self.epoch}",
                "prepare comes first",
            )
        return self._prepared

    def _require_fresh(self, epoch: int) -> None:
        if self._prepared is not None:
            raise _refused(
                f"worker {self.worker} cannot prepare epoch {epoch}",
                f"epoch {self._prepared.epoch} is undecided",
                "one transition at a time: resolve the undecided one first",
            )
        if epoch <= self._newest:
            raise _refused(
                f"worker {self.worker} cannot prepare epoch {epoch}",
                f"the newest epoch it has seen is {self._newest}",
                "epochs rise and are never used twice",
            )


def _refused(attempt: str, values: str, rule: str) -> InvalidOperation:
    return InvalidOperation(explain(attempt, values=values, rule=rule))
