"""State on its way between files and a GPU: through a ring of pinned host buffers, one copy ahead.

    file ──read──▶ host buffer ──lane──▶ device buffer ──cast, strides──▶ arena        `put`
    arena ──cast, strides──▶ device buffer ──lane──▶ host buffer ──write──▶ file       `get`

The file is read or written on the host while the buffer before is on its way. From pageable memory the driver
would copy once more, and the host would wait each time. A buffer is used again when its mark is reached.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereus.emu.lanes import Lane, Lanes
from nereus.emu.transport.protocol import POLL_S, REACHED, Mark

BUFFER_BYTES = 32 << 20  # a few milliseconds of a PCIe link: far above the cost of a call
NUM_BUFFERS = 3  # one read or written, one on its way, one between


@dataclass(eq=False)
class _Slot:
    host: Tensor
    near: Tensor  # the device's
    free: Mark = REACHED

    def wait(self) -> None:
        while not self.free.reached():
            time.sleep(POLL_S)


@dataclass(eq=False)
class HostRing:
    """Used by one thread. `lane` is the copies' own; it follows what the engine was given before."""

    device: torch.device
    lane: Lane
    engine: Lane
    buffer_bytes: int = BUFFER_BYTES
    _slots: deque[_Slot] = field(default_factory=deque)

    @classmethod
    def of(cls, device: torch.device) -> HostRing | None:
        """That of a GPU; None on a CPU, where state lies in host memory and needs no way to it."""
        if device.type != "cuda":
            return None
        lanes = Lanes.of(device)
        return cls(device, lane=lanes.pack, engine=lanes.engine)

    def __post_init__(self) -> None:
        pinned = self.device.type == "cuda"
        for _ in range(NUM_BUFFERS):
            host = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=pinned)
            near = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
            self.lane.keep(near)
            self._slots.append(_Slot(host, near))
        self.lane.wait(self.engine.mark())

    def put(self, source: Tensor, target: Tensor) -> None:
        """Copy a host tensor into a view of the device's memory, cast to its dtype; returns before it is
        there, when `source` may be dropped. `finish` ends it.
        """
        for part, into in _parts(source, target, self.buffer_bytes):
            slot = self._next()
            host, near = _as(slot.host, part), _as(slot.near, part)
            host.copy_(part)
            self.lane.carry(host, near)
            self.lane.copy([(near, into)])
            slot.free = self.lane.mark()

    def get(self, sources: Iterable[Tensor]) -> Iterator[Tensor]:
        """The numbers of the device's views in their order, in host tensors that are good until the next one
        is asked for. A view that is larger than a buffer comes in several, which follow one another.
        """
        ahead: deque[tuple[_Slot, Tensor]] = deque()
        for source in sources:
            for part, _ in _parts(source, source, self.buffer_bytes):
                slot = self._next()
                host, near = _as(slot.host, part), _as(slot.near, part)
                self.lane.copy([(part, near)])
                self.lane.carry(near, host)
                slot.free = self.lane.mark()
                ahead.append((slot, host))
                if len(ahead) == NUM_BUFFERS:
                    yield _landed(ahead)
        while ahead:
            yield _landed(ahead)

    def finish(self) -> None:
        """Wait until all that was put is there, also for the engine."""
        for slot in self._slots:
            slot.wait()
        self.engine.wait(self.lane.mark())

    def _next(self) -> _Slot:
        slot = self._slots.popleft()
        self._slots.append(slot)
        slot.wait()
        return slot


def _landed(ahead: deque[tuple[_Slot, Tensor]]) -> Tensor:
    slot, host = ahead.popleft()
    slot.wait()
    return host


def _as(buffer: Tensor, like: Tensor) -> Tensor:
    """The beginning of a byte buffer as a contiguous tensor of the shape and dtype of `like`."""
    return buffer[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _parts(source: Tensor, target: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both alike along their leading dimensions into parts of at most `limit` bytes of the source, in
    row-major order.
    """
    size = source.numel() * source.element_size()
    if size == 0:
        return
    if size <= limit:
        yield source, target
        return
    rows = limit * source.shape[0] // size
    if rows == 0:
        for row in range(source.shape[0]):
            yield from _parts(source[row], target[row], limit)
        return
    for low in range(0, source.shape[0], rows):
        yield source[low : low + rows], target[low : low + rows]
