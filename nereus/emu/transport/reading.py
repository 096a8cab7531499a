"""A channel between processes of which some read one another's memory: nothing is packed, one copy a byte.

    owner                                            reader
      post Offer  ── windows of the views ─────────▶ post Fetch
      (views are frozen)                             wait: windows arrived ─▶ read them, check the lease
      wait: acknowledged ◀──────────────────────────  acknowledge

Windows and acknowledgements travel over the byte channel beneath, each under a tag of its own, so that an
acknowledgement never stands in the way of the windows of a later round. An owner that gives up revokes its
lease before the views may change; a reader checks the lease after it has read, so what it read was what was
lent.

Which pairs read is agreed when the channel opens: both must have read the other's lease. The rest use the
byte channel, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nereus.emu.layout import Rank
from nereus.emu.transport import process_memory
from nereus.emu.transport.process_memory import NO_CARD, WINDOW_NUMBERS, Card, Lease, ReadFailed
from nereus.emu.transport.protocol import (
    MAX_OPERATIONS,
    REACHED,
    Broadcast,
    Deadline,
    Fetch,
    Mark,
    Offer,
    Operation,
    Pending,
    Receive,
    Send,
    failed,
    late,
)

WINDOWS, DONE = 1, 2  # tags; plain bytes travel under 0


class ByteChannel(Protocol):
    """What a reading channel needs beneath."""

    def start(self, operation: Send | Receive | Broadcast, tag: int = 0) -> Pending:
        """Begin one transfer; between two ranks those of one tag match in order."""
        ...

    def gather(self, numbers: Sequence[int], deadline: Deadline) -> list[tuple[int, ...]]:
        """The numbers of every rank, in the order of ranks. Collective. Raises TransportError."""
        ...

    def settle(self, deadline: Deadline, mark: Mark = REACHED) -> None:
        """See Channel."""
        ...

    def close(self, *, broken: bool = False) -> None:
        """See Channel."""
        ...


@dataclass(eq=False)
class ReadingChannel:
    """`peers` are those that read this rank's memory and whose memory it reads."""

    inner: ByteChannel
    worker: Rank
    lease: Lease
    peers: Mapping[Rank, Card]
    _acknowledged: list[Pending] = field(default_factory=list)

    @classmethod
    def agree(
        cls, inner: ByteChannel, ranks: Sequence[Rank], worker: Rank, *, willing: bool, deadline: Deadline
    ) -> ReadingChannel:
        """Find the pairs that can read each other; collective over `ranks`. Raises TransportError."""
        lease = Lease()
        if willing:
            process_memory.let_others_read()
        mine = lease.card if willing else NO_CARD
        cards = {
            rank: Card.of(numbers)
            for rank, numbers in zip(ranks, inner.gather(mine.numbers, deadline), strict=True)
        }
        readable = [willing and rank != worker and _can_read(cards[rank]) for rank in ranks]
        verdicts = inner.gather(list(map(int, readable)), deadline)
        at = ranks.index(worker)
        peers = {
            rank: cards[rank]
            for rank, mine_to, theirs in zip(ranks, readable, verdicts, strict=True)
            if mine_to and theirs[at]
        }
        return cls(inner=inner, worker=worker, lease=lease, peers=peers)

    def reads(self, peer: Rank) -> bool:
        """See Channel."""
        return peer in self.peers

    def lends(self, view: Tensor) -> bool:
        """See Channel."""
        found = process_memory.window(view)
        return found is not None and process_memory.reads_well(found)

    def fills(self, view: Tensor) -> bool:
        """See Channel."""
        return process_memory.window(view) is not None

    def post(self, operations: Sequence[Operation]) -> Sequence[Pending]:
        """See Channel."""
        assert len(operations) <= MAX_OPERATIONS, f"{len(operations)} operations in one group call"
        return [self._start(operation) for operation in operations]

    def _start(self, operation: Operation) -> Pending:
        match operation:
            case Offer(peer=peer, views=views):
                windows = _windows(views)
                told = self.inner.start(Send(peer, _as_bytes(windows)), WINDOWS)
                word = torch.zeros(1, dtype=torch.uint8)
                done = self.inner.start(Receive(peer, word), DONE)
                return _Offered(told=told, done=done, held=views)
            case Fetch(peer=peer, views=views):
                theirs = torch.zeros(len(views), WINDOW_NUMBERS, dtype=torch.int64)
                told = self.inner.start(Receive(peer, _as_bytes(theirs)), WINDOWS)
                return _Fetched(
                    told=told,
                    into=_windows(views),
                    out=theirs,
                    peer=peer,
                    me=self.worker,
                    card=self.peers[peer],
                    done=self._acknowledge,
                    held=views,
                )
        return self.inner.start(operation)

    def _acknowledge(self, peer: Rank) -> None:
        self._acknowledged.append(self.inner.start(Send(peer, torch.ones(1, dtype=torch.uint8)), DONE))

    def settle(self, deadline: Deadline, mark: Mark = REACHED) -> None:
        """See Channel."""
        for pending in self._acknowledged:
            pending.wait(deadline)
        self._acknowledged.clear()
        self.inner.settle(deadline, mark)

    def close(self, *, broken: bool = False) -> None:
        """See Channel."""
        self.lease.revoke()
        self.inner.close(broken=broken)
        self._acknowledged.clear()


def _can_read(card: Card) -> bool:
    with suppress(ReadFailed):
        card.check()
        return True
    return False


def _windows(views: Sequence[Tensor]) -> Tensor:
    found = [process_memory.window(view) for view in views]
    return torch.tensor(found, dtype=torch.int64).view(-1, WINDOW_NUMBERS)


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.view(-1).view(torch.uint8)


@dataclass(eq=False, slots=True)
class _Offered:
    told: Pending
    done: Pending
    held: tuple[Tensor, ...]  # keeps the memory of the windows

    def wait(self, deadline: Deadline) -> None:
        self.told.wait(deadline)
        self.done.wait(deadline)


@dataclass(eq=False, slots=True)
class _Fetched:
    told: Pending
    into: Tensor
    out: Tensor
    peer: Rank
    me: Rank
    card: Card
    done: Callable[[Rank], None]
    held: tuple[Tensor, ...]

    def wait(self, deadline: Deadline) -> None:
        self.told.wait(deadline)
        ours, theirs = self.into.numpy(), self.out.numpy()
        try:
            if not np.array_equal(process_memory.num_bytes(ours), process_memory.num_bytes(theirs)):
                raise ReadFailed("it offers other sizes than planned")
            process_memory.read(
                self.card.pid,
                process_memory.runs(ours),
                process_memory.runs(theirs),
                check=lambda: self._in_time(deadline),
            )
            self.card.check()
        except ReadFailed as error:
            raise failed("read the memory of", self.peer, self.me, str(error)) from error
        self.done(self.peer)

    def _in_time(self, deadline: Deadline) -> None:
        if deadline.left_s == 0:
            raise late("read the memory of", self.peer, self.me, deadline.allowed_s)
