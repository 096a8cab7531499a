"""A transport inside one process, for tests and the simulator: ranks are threads that share a hub."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nereus.emu.layout import Rank
from nereus.emu.transport.protocol import (
    MAX_OPERATIONS,
    REACHED,
    Broadcast,
    Channel,
    Deadline,
    Fetch,
    Groups,
    Mark,
    Offer,
    Operation,
    Pending,
    Send,
    failed,
    late,
    reached_in_time,
    spent,
)
from nereus.errors import TransportError, explain

Key = tuple[int, str]  # epoch, digest


@dataclass
class Hub:
    """What the ranks share: who is present, who has gone, and messages on their way."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    present: dict[Key, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    declined: dict[Key, dict[Rank, str]] = field(default_factory=lambda: defaultdict(dict))
    gone: dict[Key, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    mail: dict[tuple[Key, Rank, Rank], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))


@dataclass(eq=False)
class MemoryTransport:
    """One rank's end of the hub."""

    hub: Hub
    worker: Rank
    _open: dict[Key, _MemoryChannel] = field(default_factory=dict)
    _spent: set[Key] = field(default_factory=set)

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
            self._meet(key, set(ranks), deadline)
            self._open[key] = _MemoryChannel(hub=self.hub, worker=self.worker, key=key)
        return self._open[key]

    def _meet(self, key: Key, ranks: set[Rank], deadline: Deadline) -> None:
        with self.hub.changed:
            self.hub.present[key].add(self.worker)
            self.hub.changed.notify_all()
            declined = self.hub.declined[key]
            self.hub.changed.wait_for(
                lambda: ranks <= self.hub.present[key] | declined.keys(), deadline.left_s
            )
            absent = sorted(ranks - self.hub.present[key] - declined.keys())
            if absent or declined:
                words = ", ".join(f"worker {worker} declined: {why}" for worker, why in declined.items())
                raise TransportError(
                    explain(
                        f"worker {self.worker} waited for {sorted(ranks)} to open epoch {key[0]}",
                        values=words or f"absent: {absent}",
                        rule=f"all must come within {deadline.allowed_s:.3g} s",
                    )
                )

    def decline(self, *, epoch: int, digest: str, reason: str) -> None:
        """See Transport."""
        with self.hub.changed:
            self.hub.declined[epoch, digest][self.worker] = reason
            self.hub.changed.notify_all()

    def close(self, epoch: int, *, broken: bool = False) -> None:
        """See Transport."""
        for key in [key for key in self._open if key[0] == epoch]:
            self._open.pop(key).close(broken=broken)
            self._spent.add(key)


@dataclass(eq=False)
class _MemoryChannel:
    hub: Hub
    worker: Rank
    key: Key

    def post(self, operations: Sequence[Operation]) -> Sequence[Pending]:
        assert len(operations) <= MAX_OPERATIONS, f"{len(operations)} operations in one group call"
        return [self._start(operation) for operation in operations]

    def _start(self, operation: Operation) -> Pending:
        assert not isinstance(operation, Offer | Fetch), "this channel lends nothing"
        hub, peer = self.hub, operation.peer
        targets: tuple[Rank, ...] = ()
        if isinstance(operation, Send):
            targets = (peer,)
        elif isinstance(operation, Broadcast) and peer == self.worker:
            targets = tuple(rank for rank in operation.ranks if rank != self.worker)
        with hub.changed:
            for target in targets:
                if target in hub.gone[self.key]:
                    raise failed("send to", target, self.worker, "it closed the channel")
                hub.mail[self.key, self.worker, target].append(operation.buffer.clone())
            hub.changed.notify_all()
        if targets:
            return _Done()
        return _Awaited(channel=self, peer=peer, buffer=operation.buffer)

    def reads(self, peer: Rank) -> bool:
        """A peer's copy stands for the wire here."""
        return False

    def lends(self, view: Tensor) -> bool:
        """See Channel."""
        return False

    def fills(self, view: Tensor) -> bool:
        """See Channel."""
        return False

    def settle(self, deadline: Deadline, mark: Mark = REACHED) -> None:
        """Nothing is asynchronous here but the caller's own work."""
        if not reached_in_time(mark, deadline):
            raise late("settle with", self.worker, self.worker, deadline.allowed_s)

    def close(self, *, broken: bool = False) -> None:
        with self.hub.changed:
            self.hub.gone[self.key].add(self.worker)
            self.hub.changed.notify_all()


class _Done:
    def wait(self, deadline: Deadline) -> None:
        """The buffer was copied when it was posted."""


@dataclass(eq=False)
class _Awaited:
    channel: _MemoryChannel
    peer: Rank
    buffer: Tensor

    def wait(self, deadline: Deadline) -> None:
        channel, hub = self.channel, self.channel.hub
        box = hub.mail[channel.key, self.peer, channel.worker]
        with hub.changed:
            closed = hub.gone[channel.key]
            if not hub.changed.wait_for(lambda: box or self.peer in closed, deadline.left_s):
                raise late("receive from", self.peer, channel.worker, deadline.allowed_s)
            if not box:
                raise failed("receive from", self.peer, channel.worker, "it closed the channel")
            self.buffer.copy_(box.popleft())
