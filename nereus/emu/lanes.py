"""Lanes: queues of device work, and the marks by which one lane waits for another.

    engine ──mark──▶ pack    buffers are filled, what stays on the rank is copied
                      │ mark
                      ▼
                     wire    group calls begin         (the communicator's own stream follows this lane)
                      │ completion of a call
                      ▼
                     unpack  buffers are emptied ──mark──▶ a buffer may be filled anew; the engine reads

While one round is on the wire the next one is packed and the one before unpacked; nothing here makes the
host wait. On a GPU a lane is a stream and a mark an event (CUDA's names, which ROCm's torch has, too). On a
CPU all work is done when it is given, and marks are reached when they are made: the same code runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nereus.emu.transport.protocol import REACHED, Channel, Deadline, Mark, Operation, Pending
from nereus.kernels.regions import Pairs, copy_regions


class Lane(Protocol):
    """Work that is done in the order in which it is given."""

    def copy(self, pairs: Pairs) -> None:
        """Copy every source into its target, cast to its dtype."""
        ...

    def give(self, work: Callable[[], None]) -> None:
        """Do any other work that a device takes in the order of its current stream."""
        ...

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Copy between host and device, both contiguous. Host memory is pinned, and its user waits for a mark
        before it is changed.
        """
        ...

    def post(self, channel: Channel, operations: Sequence[Operation]) -> Sequence[Pending]:
        """Begin one group call, after what was given to this lane before. Raises TransportError."""
        ...

    def land(self, pending: Pending, deadline: Deadline) -> None:
        """Go on once the operation is complete. Raises TransportError where that is known at once."""
        ...

    def mark(self) -> Mark:
        """What was given to this lane so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let what is given from here on wait for a mark, of any lane of the device."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """Whoever lets go of the tensor: its memory goes to nobody else before this lane is past it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Those of one move. `engine` is what the caller's own work runs in."""

    engine: Lane
    pack: Lane
    wire: Lane
    unpack: Lane

    @property
    def own(self) -> tuple[Lane, ...]:
        """All but the engine's."""
        return self.pack, self.wire, self.unpack

    @classmethod
    def of(cls, device: torch.device) -> Lanes:
        """Three streams of a GPU beside the current one; one after the other on a CPU."""
        if device.type != "cuda":
            host = HostLane()
            return cls(engine=host, pack=host, wire=host, unpack=host)
        streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
        pack, wire, unpack = (StreamLane(device, stream) for stream in streams)
        return cls(engine=StreamLane(device, None), pack=pack, wire=wire, unpack=unpack)

    def begin(self) -> None:
        """Let the move follow what the engine has been given so far."""
        mark = self.engine.mark()
        for lane in self.own:
            lane.wait(mark)

    def keep(self, tensor: Tensor) -> None:
        """See Lane: for all lanes of the move."""
        for lane in self.own:
            lane.keep(tensor)

    def end(self) -> Mark:
        """Let the engine go on after the move; the mark of its end."""
        for lane in (self.pack, self.wire):
            self.unpack.wait(lane.mark())
        mark = self.unpack.mark()
        self.engine.wait(mark)
        return mark


class HostLane:
    """A lane of a CPU: work is done when it is given."""

    def copy(self, pairs: Pairs) -> None:
        """See Lane."""
        copy_regions(pairs)

    def give(self, work: Callable[[], None]) -> None:
        """See Lane."""
        work()

    def carry(self, source: Tensor, target: Tensor) -> None:
        """See Lane."""
        target.copy_(source)

    def post(self, channel: Channel, operations: Sequence[Operation]) -> Sequence[Pending]:
        """See Lane."""
        return channel.post(operations)

    def land(self, pending: Pending, deadline: Deadline) -> None:
        """See Lane."""
        pending.wait(deadline)

    def mark(self) -> Mark:
        """See Lane."""
        return REACHED

    def wait(self, mark: Mark) -> None:
        """See Lane."""
        assert mark.reached(), "on a CPU nothing is left to do"

    def keep(self, tensor: Tensor) -> None:
        """See Lane: a tensor in use is held by its user."""


@dataclass(frozen=True, eq=False, slots=True)
class _StreamMark:
    event: torch.cuda.Event

    def reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False, slots=True)
class StreamLane:
    """A stream of a GPU; without one, whichever is current where the lane is used."""

    device: torch.device
    stream: torch.cuda.Stream | None

    def copy(self, pairs: Pairs) -> None:
        """See Lane."""
        with torch.cuda.stream(self._stream()):
            copy_regions(pairs)

    def give(self, work: Callable[[], None]) -> None:
        """See Lane."""
        with torch.cuda.stream(self._stream()):
            work()

    def carry(self, source: Tensor, target: Tensor) -> None:
        """See Lane."""
        with torch.cuda.stream(self._stream()):
            target.copy_(source, non_blocking=True)

    def post(self, channel: Channel, operations: Sequence[Operation]) -> Sequence[Pending]:
        """See Lane. torch's NCCL groups let their own stream follow the current one."""
        with torch.cuda.stream(self._stream()):
            return channel.post(operations)

    def land(self, pending: Pending, deadline: Deadline) -> None:
        """See Lane. The wait of an NCCL operation lets the current stream follow it."""
        with torch.cuda.stream(self._stream()):
            pending.wait(deadline)

    def mark(self) -> Mark:
        """See Lane."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream())
        return _StreamMark(event)

    def wait(self, mark: Mark) -> None:
        """See Lane."""
        if isinstance(mark, _StreamMark):
            self._stream().wait_event(mark.event)

    def keep(self, tensor: Tensor) -> None:
        """See Lane. Memory of the host is held by its user."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream())

    def _stream(self) -> torch.cuda.Stream:
        return self.stream or torch.cuda.current_stream(self.device)
