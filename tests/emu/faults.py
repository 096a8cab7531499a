"""Faults planted in workers and coordinators of a transition, and the scripts that run there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nereus.config.environment import reads_memory
from nereus.emu.arena import ShardState
from nereus.emu.ballot import cast, collect
from nereus.emu.coordinator import Coordinator
from nereus.emu.decision import CopiedRecord, Decision, DecisionRecord, FileRecord, StoreRecord
from nereus.emu.executor import Executor
from nereus.emu.layout import Rank
from nereus.emu.orders import Order, Phase, SpillOrder
from nereus.emu.store import Store, StoreAddress, connect
from nereus.emu.tensor import ModelSpec
from nereus.emu.transaction import Participant
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.protocol import (
    REACHED,
    Channel,
    Deadline,
    Groups,
    Mark,
    Operation,
    Pending,
    Transport,
)
from nereus.emu.unit import Unit
from nereus.errors import TransportError
from tests.emu.states import differences, direct_state, empty_state

KEY = "actor.training"
HELD: dict[str, Any] = {}
Point = (
    Phase | Literal["opening", "opened", "posted", "waited", "allocating", "voted", "collected", "decided"]
)
Action = Literal["kill", "delay", "raise"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one worker when it first reaches a point."""

    worker: Rank
    point: Point
    action: Action
    delay_s: float = 0.0


class PlantedError(Exception):
    """Raised by a fault where the code under test expects no error."""


@dataclass
class Trap:
    """Springs once."""

    fault: Fault | None

    def __call__(self, point: Point) -> None:
        if self.fault is None or point != self.fault.point:
            return
        fault, self.fault = self.fault, None
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "delay":
                time.sleep(fault.delay_s)
            case "raise":
                raise MemoryError("planted") if point == "allocating" else PlantedError(str(point))


@dataclass
class FaultyTransport:
    """A transport with traps on the way."""

    inner: Transport
    trap: Trap

    def open(
        self,
        ranks: Sequence[Rank],
        *,
        epoch: int,
        digest: str,
        deadline: Deadline,
        groups: Groups = (),
    ) -> Channel:
        self.trap("opening")
        channel = self.inner.open(ranks, epoch=epoch, digest=digest, deadline=deadline, groups=groups)
        self.trap("opened")
        return FaultyChannel(channel, self.trap)

    def decline(self, *, epoch: int, digest: str, reason: str) -> None:
        self.inner.decline(epoch=epoch, digest=digest, reason=reason)

    def close(self, epoch: int, *, broken: bool = False) -> None:
        self.inner.close(epoch, broken=broken)


@dataclass
class FaultyChannel:
    inner: Channel
    trap: Trap

    def post(self, operations: Sequence[Operation]) -> Sequence[Pending]:
        pending = self.inner.post(operations)
        self.trap("posted")
        return [FaultyPending(one, self.trap) for one in pending]

    def reads(self, peer: Rank) -> bool:
        return self.inner.reads(peer)

    def lends(self, view: Tensor) -> bool:
        return self.inner.lends(view)

    def fills(self, view: Tensor) -> bool:
        return self.inner.fills(view)

    def settle(self, deadline: Deadline, mark: Mark = REACHED) -> None:
        self.inner.settle(deadline, mark)

    def close(self, *, broken: bool = False) -> None:
        self.inner.close(broken=broken)


@dataclass
class FaultyPending:
    inner: Pending
    trap: Trap

    def wait(self, deadline: Deadline) -> None:
        self.inner.wait(deadline)
        self.trap("waited")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker says after a transition: the epoch it holds, and what differs from the direct build."""

    decision: Decision | None
    epoch: int
    wrong: tuple[str, ...]
    raised: str = ""
    seconds: float = 0.0


def participant_of(worker: Rank, address: StoreAddress) -> Participant:
    """The process's participant; its transport lives through epochs, as a worker's does."""
    if HELD.get("address") != address:
        transport = CollectiveTransport.connect(address, worker=worker, reads=reads_memory())
        HELD["executor"] = Executor(transport, torch.device("cpu"))
        HELD["transport"], HELD["address"] = transport, address
        HELD["store"] = connect(address, timeout_s=30)
        HELD["participant"] = Participant(worker, HELD["executor"], allocate)
    participant: Participant = HELD["participant"]
    return participant


def allocate(order: Order) -> ShardState:
    """The zeroed shard, in the form that the plan's mode asks for."""
    plan = order.plan
    assert plan.new is not None
    bounded = plan.mode == "bounded"
    return empty_state(order.model, plan.new, plan.rank, allocated=not bounded)


def begin(worker: Rank, address: StoreAddress, model: ModelSpec, units: tuple[Unit, ...]) -> None:
    """Hold the directly built shard of the old layout and nothing else."""
    participant = participant_of(worker, address)
    mine = next((unit for unit in units if worker in unit.ranks), None)
    participant.live.clear()
    if mine is not None:
        participant.live[KEY] = direct_state(model, mine, worker)


def record_of(store: Any, folder: Path | None) -> DecisionRecord:
    quick = StoreRecord(store)
    return quick if folder is None else CopiedRecord(FileRecord(folder), [quick])


def take_part(
    worker: Rank,
    address: StoreAddress,
    folder: Path | None,
    epoch: int,
    order: Order,
    fault: Fault | None,
    deadline_s: float,
    spills: bool,
) -> Answer:
    """Prepare, vote, wait for the decision, act on it; then compare what is held with the direct build.

    With `spills` an old shard that ends goes to host memory first.
    """
    start = time.monotonic()
    participant = participant_of(worker, address)
    trap = Trap(fault if fault is not None and fault.worker == worker else None)
    participant.observe = trap
    participant.executor.transport = FaultyTransport(HELD["transport"], trap)

    def allocate_with_trap(order: Order) -> ShardState:
        trap("allocating")
        return allocate(order)

    participant.allocate = allocate_with_trap
    participant.begin(epoch)
    old = order.plan.old
    if spills and old is not None and old != order.plan.new:
        spill = SpillOrder(source=order.source, model=order.stored or order.model, unit=old)
        participant.spill(spill, deadline_s=deadline_s)
    participant.prepare(order, deadline_s=deadline_s)
    vote = participant.vote()
    raised = ""
    decision: Decision | None = None
    try:
        with suppress(TransportError):  # a vote that cannot be cast is a no
            cast(HELD["store"], vote)
        trap("voted")
        record = record_of(HELD["store"], folder)
        for _ in range(60):  # the wait is not the transfer's deadline and never ends the worker
            if (decision := participant.resolve(record, wait_s=1.0)) is not None:
                break
    except PlantedError as error:
        raised = str(error)
    before = participant.epoch == epoch
    unit = order.plan.new if before else order.plan.old
    wrong = () if unit is None else tuple(differences(participant.live[KEY], built(order, unit)))
    if unit is None and KEY in participant.live:
        wrong = ("holds a shard that it should not",)
    if participant.undecided is not None:
        wrong = (*wrong, "undecided")
    return Answer(
        decision=decision,
        epoch=participant.epoch,
        wrong=wrong,
        raised=raised,
        seconds=time.monotonic() - start,
    )


def built(order: Order, unit: Unit) -> ShardState:
    return direct_state(order.model, unit, order.plan.rank)


def open_store(worker: Rank) -> StoreAddress:
    """Host a store in this process, so that it dies with the coordinator."""
    HELD["own_store"] = Store()
    address: StoreAddress = HELD["own_store"].address
    return address


def coordinate(
    worker: Rank,
    address: StoreAddress,
    folder: Path | None,
    epoch: int,
    workers: tuple[Rank, ...],
    fault: Fault | None,
) -> Decision:
    """Collect the votes and decide, with traps before and after."""
    store = connect(address, timeout_s=30)
    trap = Trap(fault)
    trap("opening")
    votes = collect(store, epoch, workers, deadline_s=30)
    trap("collected")
    decision = Coordinator(record_of(store, folder)).decide(epoch, workers, votes)
    trap("decided")
    return decision
