"""Reusable byte buffers in which regions that are not one run of memory are packed for the wire."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereus.emu.lanes import Lane, Lanes
from nereus.emu.transport.protocol import Mark


@dataclass(frozen=True, slots=True)
class _Free:
    buffer: Tensor
    read: Mark


@dataclass(eq=False)
class StagingPool:
    """Buffers that were given back are handed out again; `peak_bytes` is the most handed out at once.

    A buffer is given back when its last reader was given to a lane, which need not have run by then: the lane
    that fills it next waits for that.
    """

    device: torch.device
    lanes: Lanes
    peak_bytes: int = 0
    _out_bytes: int = 0
    _free: list[_Free] = field(default_factory=list)  # ascending by size

    def take(self, num_bytes: int, writer: Lane) -> Tensor:
        """A uint8 buffer of that size for `writer` to fill: a view of the smallest free one that fits, or a
        new one.
        """
        at = bisect_left(self._free, num_bytes, key=_size)
        # A much larger buffer is left for a request that needs it.
        if at < len(self._free) and _size(self._free[at]) <= 2 * num_bytes:
            found = self._free.pop(at)
            writer.wait(found.read)
            buffer = found.buffer[:num_bytes]
        else:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            writer.wait(self.lanes.engine.mark())  # which may still use memory that torch has handed on
            self.lanes.keep(buffer)
        self._out_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._out_bytes)
        return buffer

    def give(self, buffer: Tensor, read: Mark) -> None:
        """Take a buffer back; what was in it has been read at the mark."""
        self._out_bytes -= buffer.numel()
        whole = buffer._base if buffer._base is not None else buffer
        self._free.insert(bisect_left(self._free, whole.numel(), key=_size), _Free(whole, read))

    def forget(self) -> None:
        """Drop all buffers and restart the count; those still out are not expected back."""
        self._free.clear()
        self._out_bytes = self.peak_bytes = 0


def _size(free: _Free) -> int:
    return free.buffer.numel()
