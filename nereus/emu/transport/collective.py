"""The transport between processes: gloo on CPUs and NCCL (RCCL) on GPUs, by the same code.

Each (epoch, plan) gets its own communicator on its own store prefix, outside any default world: it spans old
and new workers while the unit groups of the old generation stay untouched, and it dies with its epoch. gloo
connects eagerly: lazy connection to a dead peer blocks 25 s whatever the timeout (measured, torch 2.13).

On CPUs, ranks of one host read one another's memory (`reading`); the communicator then carries words only.
"""

from __future__ import annotations

import threading
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
from nereus.emu.store import StoreAddress, connect, decline, decliners, meet
from nereus.emu.transport.protocol import (
    MAX_OPERATIONS,
    Broadcast,
    Channel,
    Deadline,
    Groups,
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
POLL_S = 0.0005
CONNECT_POLL_S = 0.05
PLACE = "open"
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
        communicators: dict[tuple[Rank, ...], Any] = {}
        # All members make their groups in one order, so that none waits for one that waits for it.
        for members in (ranks, *sorted(set(groups) - {ranks})):
            communicators[members] = self._communicator(ranks, members, epoch, digest, deadline)
        channel = _CollectiveChannel(
            groups=communicators, ranks=ranks, worker=self.worker, device=self.device
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
        """A communicator over some `members` of the channel's ranks; collective over them."""
        prefix = _prefix(epoch, digest)
        store = PrefixStore(prefix, self.store)
        over = partial(self._over, epoch)
        if members == ranks:
            meet(store, PLACE, me=self.worker, workers=ranks, timeout_s=deadline.left_s, over=over)
        left = timedelta(seconds=max(0.001, deadline.left_s))
        place = prefix if members == ranks else f"{prefix}/{'-'.join(map(str, members))}"
        rank = members.index(self.worker)
        attempt = _Attempt(partial(_communicator, self.store, place, rank, len(members), left, self.device))
        try:
            why = attempt.wait(deadline, lambda: over() or _declined(store, ranks))
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

    def decline(self, *, epoch: int, digest: str, reason: str) -> None:
        """See Transport."""
        store = PrefixStore(_prefix(epoch, digest), self.store)
        decline(store, PLACE, worker=self.worker, reason=reason)

    def _over(self, epoch: int) -> str:
        """Why it is useless to connect for this epoch: it is decided, which can only be an abort."""
        return "the epoch is decided already" if self.store.check([decision_key(epoch)]) else ""

    def close(self, epoch: int, *, broken: bool = False) -> None:
        """See Transport."""
        for key in [key for key in self._open if key[0] == epoch]:
            self._open.pop(key).close(broken=broken)
            self._spent.add(key)


class _Attempt:
    """A communicator being made on a thread of its own, which can be left behind.

    gloo tries for 25 s to connect to a peer that died between the meeting and the connection, whatever the
    timeout (measured); NCCL may wait likewise. A thread left behind ends by itself and drops what it made.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.result: Any = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self.result = make()
        except RuntimeError as error:  # includes the store's errors
            self._problem = str(error).splitlines()[0]

    def wait(self, deadline: Deadline, over: Callable[[], str]) -> str:
        """Return when it is made, failed, given up by a peer or late: why there is none, or nothing."""
        pause_s = CONNECT_POLL_S
        while self._thread.is_alive():
            self._thread.join(pause_s)
            pause_s = min(0.1, 2 * pause_s)
            if not self._thread.is_alive():
                break
            if why := over():
                return why
            if deadline.left_s == 0:
                return "no connection at the deadline"
        return self._problem


def _declined(store: Client, ranks: Sequence[Rank]) -> str:
    words = decliners(store, PLACE, ranks)
    return ", ".join(f"worker {worker} declined: {why}" for worker, why in words.items())


def _prefix(epoch: int, digest: str) -> str:
    return f"exchange/{epoch}/{digest}"


def _communicator(
    shared: Client, prefix: str, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Any:
    """A bare backend object; it is registered nowhere, so nothing global remembers it.

    It gets a connection to the store of its own, since the caller may be left behind in a call on it.
    """
    store = PrefixStore(prefix, shared.clone())  # type: ignore[attr-defined]  # missing in the stubs
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with torch.cuda.device(device):
            group = dist.ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(device)
        return group
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@dataclass(eq=False)
class _CollectiveChannel:
    groups: dict[tuple[Rank, ...], Any]  # that of all `ranks`, and those that broadcast
    ranks: tuple[Rank, ...]
    worker: Rank
    device: torch.device
    _in_flight: list[_Work] = field(default_factory=list)

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
        self._in_flight = [started[index] for index in range(len(operations))]
        return self._in_flight

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

    def settle(self, deadline: Deadline) -> None:
        """See Channel."""
        if self.device.type != "cuda":
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        while not event.query():
            if deadline.left_s == 0:
                raise _late_on_device(self._in_flight, self.worker, deadline)
            time.sleep(POLL_S)

    def close(self, *, broken: bool = False) -> None:
        """See Channel."""
        for group in self.groups.values():
            if broken:
                group.abort()
            elif self.device.type == "cuda":
                group.shutdown()
        self._in_flight = []
        self.groups.clear()  # the last references: sockets and threads end here


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


def _late_on_device(works: Sequence[_Work], me: Rank, deadline: Deadline) -> TransportError:
    """The error of a group call that did not end in time; one group call has one completion for all peers."""
    peers = sorted({work.peer for work in works})
    return TransportError(
        explain(
            f"worker {me} waited for its exchange with workers {peers}",
            values=f"deadline {deadline.allowed_s:.3g} s",
            rule="every transfer has a deadline",
            remedy="abort the epoch and continue without the workers that died",
        )
    )


def _reason(error: RuntimeError) -> str:
    return str(error).splitlines()[0].partition("] ")[2] or str(error)
