"""The seam between the executor and the wires: channels that carry buffers between ranks, each for one epoch.

    transport.open(ranks, epoch, digest)  ──collective over ranks──▶  channel
    channel.post([Send(...), Receive(...)])  one group call  ──▶  one Pending for each
    pending.wait(deadline)  the buffer may be read (receive) or reused (send)
    channel.settle(deadline, mark)  everything up to the mark has happened on the device
    channel.close(broken=...)  peers that still wait for this rank learn it at once

A channel that failed is spent: what it carried may still arrive, so nothing may be received through it again,
and its (epoch, digest) is never opened a second time. Hence no late message of an aborted epoch can land in
a later one's storage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nereus.emu.layout import Rank
from nereus.errors import TransportError, explain

Groups = tuple[tuple[Rank, ...], ...]
POLL_S = 0.0005
MAX_OPERATIONS = 256  # NCCL can hang when one group call holds more (pytorch#174288)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on this process's monotonic clock."""

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now."""
        return cls(at_s=time.monotonic() + seconds, allowed_s=seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at_s - time.monotonic())


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Give `buffer` (contiguous uint8) to `peer`. It must not change until the send is complete."""

    peer: Rank
    buffer: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Receive:
    """Fill `buffer` (contiguous uint8) from `peer`. Buffers of one peer fill in the order they are posted."""

    peer: Rank
    buffer: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Let `peer` read `views` in their order. They must not change until the offer is complete."""

    peer: Rank
    views: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Fill `views` from the next offer of `peer`: equally many, of equal bytes, cut and strided at will."""

    peer: Rank
    views: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Fill `buffer` (contiguous uint8) of all `ranks` (ascending) from that of `root`, one of them."""

    root: Rank
    ranks: tuple[Rank, ...]
    buffer: Tensor

    @property
    def peer(self) -> Rank:
        """Whom an error names."""
        return self.root


Operation = Send | Receive | Offer | Fetch | Broadcast


class Mark(Protocol):
    """A point in the work of a device."""

    def reached(self) -> bool:
        """Whether all work before it is done. Does not wait."""
        ...


class _Reached:
    def reached(self) -> bool:
        return True


REACHED: Mark = _Reached()
"""The mark of a device that does its work when it is given."""


def reached_in_time(mark: Mark, deadline: Deadline) -> bool:
    """Ask until the mark is reached or the deadline has passed; a device that hangs holds nobody."""
    while not mark.reached():
        if deadline.left_s == 0:
            return False
        time.sleep(POLL_S)
    return True


class Pending(Protocol):
    """An operation in flight."""

    def wait(self, deadline: Deadline) -> None:
        """Return when it is complete: on the CPU, or in the order of the device's stream.

        Raises TransportError naming the peer when it is late or its connection failed.
        """
        ...


class Channel(Protocol):
    """Connections among some ranks in one epoch. Used by one thread."""

    def post(self, operations: Sequence[Operation]) -> Sequence[Pending]:
        """Start all `operations` (at most MAX_OPERATIONS) as one group call; results in their order.

        Between two ranks, sends match receives and offers match fetches in the order of posting; broadcasts
        match among ranks that the channel was opened with as a group. Raises TransportError.
        """
        ...

    def reads(self, peer: Rank) -> bool:
        """Whether this rank and `peer` use Offer and Fetch; else Send and Receive. Alike at both."""
        ...

    def lends(self, view: Tensor) -> bool:
        """Whether an Offer should contain the view as it lies; otherwise give a contiguous copy."""
        ...

    def fills(self, view: Tensor) -> bool:
        """Whether a Fetch can fill the view as it lies; otherwise give a contiguous buffer."""
        ...

    def settle(self, deadline: Deadline, mark: Mark = REACHED) -> None:
        """Return when all that was waited for is complete, and `mark` is reached. Raises TransportError."""
        ...

    def close(self, *, broken: bool = False) -> None:
        """End the connections. With `broken` operations in flight are abandoned. Idempotent."""
        ...


class Transport(Protocol):
    """Makes channels for this rank."""

    def open(
        self,
        ranks: Sequence[Rank],
        *,
        epoch: int,
        digest: str,
        deadline: Deadline,
        groups: Groups = (),
    ) -> Channel:
        """The channel over `ranks` for this epoch and plan; the same object while it is open.

        `groups` are the sets of ranks, this one among them, that broadcast; ascending, and sets too.
        Collective over `ranks`. Raises TransportError when a rank is absent at the deadline, came with
        another plan, or the channel was closed before.
        """
        ...

    def decline(self, *, epoch: int, digest: str, reason: str) -> None:
        """Tell the others, who may wait in `open`, that this rank will not come."""
        ...

    def close(self, epoch: int, *, broken: bool = False) -> None:
        """Close every channel of the epoch. They cannot be opened again.

        On success close after every rank has reported: earlier, a peer may still be connecting to others.
        """
        ...


def late(action: str, peer: Rank, me: Rank, allowed_s: float) -> TransportError:
    """The error of a peer that did not answer in time."""
    return TransportError(
        explain(
            f"worker {me} could not {action} worker {peer} in time",
            values=f"deadline {allowed_s:.3g} s",
            rule="every transfer has a deadline",
            remedy="abort the epoch; if the peer is alive, allow more time",
        )
    )


def failed(action: str, peer: Rank, me: Rank, reason: str) -> TransportError:
    """The error of a connection that broke."""
    return TransportError(
        explain(
            f"worker {me} could not {action} worker {peer}",
            values=reason,
            rule="a broken connection ends the epoch",
            remedy="abort it and continue without the peer if it is dead",
        )
    )


def spent(epoch: int, digest: str) -> TransportError:
    """The error of opening a channel a second time."""
    return TransportError(
        explain(
            "cannot open the channel again",
            values=f"epoch={epoch} plan={digest[:12]}",
            rule="messages of a closed channel may still arrive",
            remedy="take a new epoch",
        )
    )
