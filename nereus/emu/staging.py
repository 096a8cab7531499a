"""Reusable byte buffers in which regions that are not one run of memory are packed for the wire."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class StagingPool:
    """Buffers that were given back are handed out again; `peak_bytes` is the most handed out at once."""

    device: torch.device
    peak_bytes: int = 0
    _out_bytes: int = 0
    _free: list[Tensor] = field(default_factory=list)  # ascending by size

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 buffer of that size: a view of the smallest free one that fits, or a new one."""
        at = bisect_left(self._free, num_bytes, key=Tensor.numel)
        # A much larger buffer is left for a request that needs it.
        if at < len(self._free) and self._free[at].numel() <= 2 * num_bytes:
            buffer = self._free.pop(at)[:num_bytes]
        else:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._out_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._out_bytes)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._out_bytes -= buffer.numel()
        whole = buffer._base if buffer._base is not None else buffer
        self._free.insert(bisect_left(self._free, whole.numel(), key=Tensor.numel), whole)

    def forget(self) -> None:
        """Drop all buffers and restart the count; those still out are not expected back."""
        self._free.clear()
        self._out_bytes = self.peak_bytes = 0
