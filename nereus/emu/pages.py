"""One range of addresses whose parts can be given back while the rest stays: the memory behind an arena.

A bounded move frees the old shard tensor by tensor and fills the new one likewise, yet optimizers and
all-reduces want each kind of state as one flat tensor. On a Linux CPU both hold: memory is mapped when it is
first written, and whole pages are returned to the system in place. Large ranges that are used as a whole
come in huge pages, in which the first write into memory, which a new shard always pays, costs a third.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

HUGE_BYTES = 2 << 20


def mappable(device: torch.device) -> bool:
    """Whether parts of a range on this device can be given back."""
    return device.type == "cpu" and sys.platform == "linux"


@dataclass(eq=False)
class Pages:
    """`flat` is the range as bytes, zero at first. Only what is held may be read or written.

    `whole` says that all of it will be held at once: it may then come in huge pages.
    """

    num_bytes: int
    device: torch.device
    whole: bool
    flat: Tensor = field(init=False)
    _memory: mmap.mmap | None = None
    _holders: np.ndarray[tuple[int], np.dtype[np.int32]] = field(init=False)

    def __post_init__(self) -> None:
        self._holders = np.zeros(-(-self.num_bytes // mmap.PAGESIZE), dtype=np.int32)
        if self.num_bytes == 0 or not mappable(self.device):
            self.flat = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
            return
        try:
            self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {self.num_bytes} bytes of address space: {error}") from error
        if self.whole and self.num_bytes >= 4 * HUGE_BYTES:
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.flat = torch.frombuffer(self._memory, dtype=torch.uint8)

    @property
    def releases(self) -> bool:
        """Whether `release` gives memory back."""
        return self._memory is not None

    def hold(self, lo: int, hi: int) -> None:
        """Bytes [lo, hi) are in use; what two parts share is in use until both are released."""
        self._holders[lo // mmap.PAGESIZE : -(-hi // mmap.PAGESIZE)] += 1

    def release(self, lo: int, hi: int) -> None:
        """Give back the pages of bytes [lo, hi) that nothing else holds; they read as zeros then."""
        assert self._memory is not None, "this device gives nothing back"
        first, last = lo // mmap.PAGESIZE, -(-hi // mmap.PAGESIZE)
        self._holders[first:last] -= 1
        # Only the first and the last page can be shared with a neighbour.
        while first < last and self._holders[first]:
            first += 1
        while first < last and self._holders[last - 1]:
            last -= 1
        if first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
