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

Bounded mode frees old storage while it moves, so nothing can be undone: its vote says only that all ranks are
connected, and the move runs after the decision. A replica that the plan keeps must survive it
(`coordinator.check_bounded`); a unit of which any rank lost its state is destroyed and extended anew from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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

    `source` and `target` are equal for a change of layout; they differ where one model-stage is filled from
    another. Without a target of its own, the worker then only serves. `model` is how the target is stored,
    `stored` how the source is, where that differs.
    """

    source: str
    target: str
    model: ModelSpec
    plan: RankPlan
    stored: ModelSpec | None = None

    @property
    def changes_target(self) -> bool:
        """Whether this worker's shard of the target is another one afterwards, or none, or confirmed."""
        return self.source == self.target or self.plan.new is not None


# Makes the zeroed shard that an order's plan fills. Raises MemoryError or RuntimeError when there is no room.
Allocate = Callable[[Order], ShardState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A state that a bounded move broke off in the middle: its unit must be destroyed and extended anew."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What acting on a decision came to: states that bounded moves lost, bytes that they sent by target."""

    lost: tuple[Lost, ...] = ()
    sent_bytes: Mapping[str, int] = field(default_factory=dict)


class _NoRoom(Exception):
    """The allocator refused; becomes a no vote or a lost unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one worker did for one operation; `reason` says why it could not, and is empty when it could."""

    worker: Rank
    epoch: int
    reason: str = ""
    sent_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Prepared:
    epoch: int
    orders: list[Order] = field(default_factory=list)
    shadows: dict[str, ShardState | None] = field(default_factory=dict)
    done: list[Moved] = field(default_factory=list)
    reason: str = ""
    vote: Vote | None = None
    deadline_s: float = 0.0

    @property
    def targets(self) -> set[str]:
        """Model-stages that an order has made or dropped."""
        return {order.target for order in self.orders if order.changes_target}


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

    def begin(self, epoch: int) -> None:
        """Open an epoch. Nothing is allocated or moved yet.

        Raises InvalidOperation when an earlier epoch is undecided, or `epoch` is not a new one.
        """
        self._require_fresh(epoch)
        self._newest = epoch
        self._prepared = _Prepared(epoch=epoch)
        self.observe(Phase.BEGUN)

    def prepare(self, order: Order, *, deadline_s: float) -> Moved:
        """Build one operation's new shard beside the old one; collective over the workers of its plan.

        Operations come in one order on all workers that share them. Never raises for what can go wrong on the
        way (no memory, a peer that is late or gone): the epoch has then failed, and the reason is returned.
        Raises InvalidOperation when no epoch is open, when the live shard is not the one planned for, or when
        an earlier operation of the epoch has the same target.
        """
        prepared = self._require_open(order)
        start = time.monotonic()
        prepared.orders.append(order)
        prepared.deadline_s = deadline_s
        sent_bytes = 0
        if prepared.reason:
            self._decline(prepared, order)
        else:
            try:
                sent_bytes = self._move(order, prepared, Deadline.after(deadline_s))
                self.observe(Phase.MOVED)
            except (TransportError, _NoRoom) as error:
                prepared.reason = str(error)
                prepared.shadows.clear()
                self._withdraw(prepared)
        moved = Moved(
            worker=self.worker,
            epoch=prepared.epoch,
            reason=prepared.reason,
            sent_bytes=sent_bytes,
            seconds=time.monotonic() - start,
        )
        prepared.done.append(moved)
        return moved

    def vote(self) -> Vote:
        """Say whether all operations of the open epoch are done; none may follow.

        Raises InvalidOperation when no epoch is open.
        """
        prepared = self._require_open()
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

    def _move(self, order: Order, prepared: _Prepared, deadline: Deadline) -> int:
        plan, old = order.plan, self._source(order)
        if plan.mode == "bounded":
            self.executor.open(plan, epoch=prepared.epoch, deadline=deadline)
            return 0
        new = self._target(order, old)
        self.observe(Phase.ALLOCATED)
        report = self.executor.run(plan, old, new, epoch=prepared.epoch, deadline=deadline)
        if order.changes_target:
            prepared.shadows[order.target] = new
        return report.sent_bytes

    def _withdraw(self, prepared: _Prepared) -> None:
        """Let the peers know now, not at the deadline: those connected, and those who wait to connect."""
        self.executor.transport.close(prepared.epoch, broken=True)
        for order in prepared.orders:
            self._decline(prepared, order)

    def _decline(self, prepared: _Prepared, order: Order) -> None:
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
        if state is None or state.shard != shard(order.stored or order.model, plan.old.layout, plan.rank):
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
        if decision.commits:
            return self._commit(prepared, decision)
        self._abort(prepared)
        return Applied()

    def _commit(self, prepared: _Prepared, decision: Decision) -> Applied:
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

    def _move_bounded(self, prepared: _Prepared) -> Applied:
        """Run the moves that free their source. One that fails leaves nothing of its state."""
        lost: list[Lost] = []
        sent_bytes: dict[str, int] = {}
        deadline = Deadline.after(prepared.deadline_s)
        for order in prepared.orders:
            plan, old = order.plan, self._source(order)
            if plan.mode != "bounded":
                continue
            try:
                new = self._target(order, old)
                report = self.executor.run(plan, old, new, epoch=prepared.epoch, deadline=deadline)
                sent_bytes[order.target] = report.sent_bytes
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

    def _require_open(self, order: Order | None = None) -> _Prepared:
        prepared = self._prepared
        doing = "vote" if order is None else f"prepare {order.target}"
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

    def _require_prepared(self) -> _Prepared:
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
