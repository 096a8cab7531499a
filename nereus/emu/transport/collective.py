"""The transport between processes: gloo on CPUs and NCCL (RCCL) on GPUs, by the same code.

Each (epoch, plan) gets its own communicator on its own store prefix, outside any default world: it spans old
and new workers while the unit groups of the old generation stay untouched, and it dies with its epoch. gloo
connects eagerly: lazy connection to a dead peer blocks 25 s whatever the timeout (measured, torch 2.13).

On CPUs, ranks of one host read one another's memory (`reading`); the communicator then carries words only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as Client

from nereus.emu.decision import decision_key
from nereus.emu.layout import Rank
from nereus.emu.store import StoreAddress, connect, decline, meet
from nereus.emu.transport.connecting import (
    PLACE,
    Attempt,
    declined_by,
    end_groups,
    make_communicator,
    prefix_of,
)
from nereus.emu.transport.protocol import (
    MAX_OPERATIONS,
    POLL_S,
    REACHED,
    Broadcast,
    Channel,
    Deadline,
    Groups,
    Mark,
    Operation,
    Pending,
    Receive,
    Send,
    failed,
    late,
    spent,
)
from nereus.emu.transport.reading import ReadingChannel
from nereus.errors import TransportError, explain

Key = tuple[int, str]  # epoch, digest
DECIDED_POLL_S = 0.1
CPU = torch.device("cpu")


@dataclass(eq=False)
class CollectiveTransport:
    """This worker's transport for its whole life; it outlives generations.

    `store` is the driver's, without a prefix. A worker that waits to connect sees there when its epoch is
    decided, so the driver need not know who waits for a worker that has died. Without `reads`, all bytes go
    through the communicator, also those of ranks on one host.
    """

    store: Client
    worker: Rank
    device: torch.device = CPU
    reads: bool = True
    _open: dict[Key, Channel] = field(default_factory=dict)
    _spent: set[Key] = field(default_factory=set)
    _ordered: dict[Key, dict[tuple[Rank, ...], Any]] = field(default_factory=dict)

    @classmethod
    def connect(
        cls,
        address: StoreAddress,
        *,
        worker: Rank,
        device: torch.device = CPU,
        timeout_s: float = 30.0,
        reads: bool = True,
    ) -> CollectiveTransport:
        """Over a store that the driver owns. Raises TransportError when it does not answer."""
        return cls(connect(address, timeout_s=timeout_s), worker, device, reads)

    def open(
        self,
        ranks: Sequence[Rank],
        *,
        epoch: int,
        digest: str,
        deadline: Deadline,
        groups: Groups = (),
    ) -> Channel:
        """See Transport."""
        key = (epoch, digest)
        if key in self._spent:
            raise spent(epoch, digest)
        if key not in self._open:
            try:
                self._open[key] = self._connect(tuple(sorted(ranks)), epoch, digest, deadline, groups)
            except TransportError:
                self._spent.add(key)
                raise
        return self._open[key]

    def _connect(
        self, ranks: tuple[Rank, ...], epoch: int, digest: str, deadline: Deadline, groups: Groups
    ) -> Channel:
        self._meet(ranks, epoch, digest, deadline)
        communicators: dict[tuple[Rank, ...], Any] = {}
        # All members make their groups in one order, so that none waits for one that waits for it.
        for members in (ranks, *sorted(set(groups) - {ranks})):
            communicators[members] = self._communicator(ranks, members, epoch, digest, deadline)
        channel = _CollectiveChannel(
            groups=communicators,
            ranks=ranks,
            worker=self.worker,
            device=self.device,
            over=partial(self._over, epoch),
        )
        if self.device.type == "cuda":
            return channel
        try:
            return ReadingChannel.agree(channel, ranks, self.worker, willing=self.reads, deadline=deadline)
        except TransportError:
            channel.close(broken=True)
            raise

    def _communicator(
        self,
        ranks: tuple[Rank, ...],
        members: tuple[Rank, ...],
        epoch: int,
        digest: str,
        deadline: Deadline,
    ) -> Any:
        """A communicator over some `members` of the ranks that have met; collective over them."""
        prefix = prefix_of(epoch, digest)
        store = PrefixStore(prefix, self.store)
        over = partial(self._over, epoch)
        left = timedelta(seconds=max(0.001, deadline.left_s))
        place = prefix if members == ranks else f"{prefix}/{'-'.join(map(str, members))}"
        rank = members.index(self.worker)
        attempt = Attempt(
            partial(make_communicator, self.store, place, rank, len(members), left, self.device)
        )
        try:
            why = attempt.wait(deadline, lambda: over() or declined_by(store, ranks))
        except RuntimeError as error:  # the store is gone
            why = str(error).splitlines()[0]
        if why:
            raise TransportError(
                explain(
                    f"worker {self.worker} could not connect to {list(members)} for epoch {epoch}",
                    values=why,
                    rule=f"all must be connected within {deadline.allowed_s:.3g} s",
                    remedy="abort the epoch and continue without the workers that died",
                )
            )
        return attempt.result

    def ordered(
        self, ranks: Sequence[Rank], order: tuple[Rank, ...], *, epoch: int, digest: str, deadline: Deadline
    ) -> Any:
        """The communicator of `order`; see `mesh.Connect`. It is closed with its epoch."""
        key = (epoch, digest)
        if key in self._spent:
            raise spent(epoch, digest)
        everyone = tuple(sorted(ranks))
        if key not in self._ordered:
            self._meet(everyone, epoch, digest, deadline)
        held = self._ordered.setdefault(key, {})
        if order not in held:
            held[order] = self._communicator(everyone, order, epoch, digest, deadline)
        return held[order]

    def _meet(self, ranks: tuple[Rank, ...], epoch: int, digest: str, deadline: Deadline) -> None:
        store, over = PrefixStore(prefix_of(epoch, digest), self.store), partial(self._over, epoch)
        meet(store, PLACE, me=self.worker, workers=ranks, timeout_s=deadline.left_s, over=over)

    def decline(self, *, epoch: int, digest: str, reason: str) -> None:
        """See Transport."""
        store = PrefixStore(prefix_of(epoch, digest), self.store)
        decline(store, PLACE, worker=self.worker, reason=reason)

    def _over(self, epoch: int) -> str:
        """Why it is useless to connect for this epoch: it is decided, which can only be an abort."""
        return "the epoch is decided already" if self.store.check([decision_key(epoch)]) else ""

    def close(self, epoch: int, *, broken: bool = False) -> None:
        """See Transport."""
        for key in [key for key in self._open if key[0] == epoch]:
            self._open.pop(key).close(broken=broken)
            self._spent.add(key)
        for key in [key for key in self._ordered if key[0] == epoch]:
            end_groups(list(self._ordered.pop(key).values()), self.device, broken=broken)
            self._spent.add(key)


@dataclass(eq=False)
class _CollectiveChannel:
    groups: dict[tuple[Rank, ...], Any]  # that of all `ranks`, and those that broadcast
    ranks: tuple[Rank, ...]
    worker: Rank
    device: torch.device
    over: Callable[[], str]
    _in_flight: list[_GroupCall] = field(default_factory=list)

    def post(self, operations: Sequence[Operation]) -> Sequence[Pending]:
        assert len(operations) <= MAX_OPERATIONS, f"{len(operations)} operations in one group call"
        if self.device.type != "cuda":
            return [self.start(operation) for operation in operations]
        started: dict[int, _Work] = {}
        for members in sorted(self.groups, key=lambda members: (members != self.ranks, members)):
            mine = [(i, one) for i, one in enumerate(operations) if self._group_of(one) == members]
            if not mine:
                continue
            self.groups[members]._start_coalescing()
            works = {index: self.start(operation) for index, operation in mine}
            joint = self.groups[members]._end_coalescing()
            for work in works.values():
                work.work = joint
            started |= works
            peers = frozenset(work.peer for work in works.values())
            self._in_flight.append(_GroupCall(joint, joint.get_future_result(), peers))
        self._in_flight = [call for call in self._in_flight if not call.done]
        return [started[index] for index in range(len(operations))]

    def _group_of(self, operation: Operation) -> tuple[Rank, ...]:
        return operation.ranks if isinstance(operation, Broadcast) else self.ranks

    def start(self, operation: Operation, tag: int = 0) -> _Work:
        """Begin one transfer; between two ranks those of one tag match in order."""
        assert isinstance(operation, Send | Receive | Broadcast), "this channel lends nothing"
        members = self._group_of(operation)
        group, peer = self.groups[members], members.index(operation.peer)
        action = "send to" if isinstance(operation, Send) else "receive from"
        try:
            match operation:
                case Send(buffer=buffer):
                    work = group.send([buffer], peer, tag)
                case Receive(buffer=buffer):
                    work = group.recv([buffer], peer, tag)
                case Broadcast(buffer=buffer):
                    action = f"broadcast among {list(members)} from"
                    options = dist.BroadcastOptions()
                    options.rootRank, options.rootTensor = peer, 0
                    work = group.broadcast([buffer], options)
        except RuntimeError as error:
            raise failed(action, operation.peer, self.worker, _reason(error)) from error
        return _Work(work, action, operation.peer, self.worker, self.device)

    def gather(self, numbers: Sequence[int], deadline: Deadline) -> list[tuple[int, ...]]:
        """The numbers of every rank, in the order of ranks. Collective. Raises TransportError."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in self.ranks]
        try:
            work = self.groups[self.ranks].allgather([found], [mine])
            work.wait(timedelta(seconds=max(0.001, deadline.left_s)))
        except RuntimeError as error:
            raise TransportError(
                explain(
                    f"worker {self.worker} could not hear of {list(self.ranks)} how they are reached",
                    values=_reason(error),
                    rule=f"all must tell within {deadline.allowed_s:.3g} s",
                    remedy="abort the epoch and continue without the workers that died",
                )
            ) from error
        return [tuple(one.tolist()) for one in found]

    def reads(self, peer: Rank) -> bool:
        """See Channel."""
        return False

    def lends(self, view: Tensor) -> bool:
        """See Channel."""
        return False

    def fills(self, view: Tensor) -> bool:
        """See Channel."""
        return False

    def settle(self, deadline: Deadline, mark: Mark = REACHED) -> None:
        """See Channel. The communicator's watchdog notices a peer that is gone and ends the call: the mark is
        then reached though nothing arrived. It does not notice one that shared memory with this rank; then
        the driver does, and decides the epoch.
        """
        asked_s = time.monotonic()
        while not mark.reached():
            self._check_calls()
            if deadline.left_s == 0:
                raise self._unsettled(f"deadline {deadline.allowed_s:.3g} s", "every transfer has a deadline")
            if time.monotonic() - asked_s > DECIDED_POLL_S:
                if why := self.over():
                    raise self._unsettled(why, "nothing is moved for an epoch that is decided")
                asked_s = time.monotonic()
            time.sleep(POLL_S)
        self._check_calls()

    def _check_calls(self) -> None:
        for call in self._in_flight:
            if call.failed:
                raise self._unsettled("the communicator was ended", "a broken connection ends the epoch")
        self._in_flight = [call for call in self._in_flight if not call.done]

    def _unsettled(self, values: str, rule: str) -> TransportError:
        """The error of group calls that did not end well; a call has one completion for all peers."""
        peers = sorted({peer for call in self._in_flight for peer in call.peers})
        return TransportError(
            explain(
                f"worker {self.worker} waited for its exchange with workers {peers}",
                values=values,
                rule=rule,
                remedy="abort the epoch and continue without the workers that died",
            )
        )

    def close(self, *, broken: bool = False) -> None:
        """See Channel."""
        end_groups(list(self.groups.values()), self.device, broken=broken)
        self._in_flight = []
        self.groups.clear()  # the last references: sockets and threads end here


@dataclass(frozen=True, eq=False, slots=True)
class _GroupCall:
    """An NCCL group call in flight. `result` is set by the watchdog: 0, or why it ended the call."""

    work: Any
    result: Any
    peers: frozenset[Rank]

    @property
    def done(self) -> bool:
        """Whether it has ended well."""
        return bool(self.work.is_completed()) and not self.failed

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise."""
        return bool(self.result.done()) and int(self.result.value()) != 0


@dataclass(eq=False, slots=True)
class _Work:
    work: Any
    action: str
    peer: Rank
    me: Rank
    device: torch.device

    def wait(self, deadline: Deadline) -> None:
        try:
            if self.device.type == "cuda":
                self.work.wait()  # orders the stream; `settle` watches the clock
            else:
                self.work.wait(timedelta(seconds=max(0.001, deadline.left_s)))
        except RuntimeError as error:
            reason = _reason(error)
            if "Timed out" in reason or "timeout" in reason.lower():
                raise late(self.action, self.peer, self.me, deadline.allowed_s) from error
            raise failed(self.action, self.peer, self.me, reason) from error


def _reason(error: RuntimeError) -> str:
    return str(error).splitlines()[0].partition("] ")[2] or str(error)
