"""One range of addresses whose parts can be given back while the rest stays: the memory behind an arena.

A bounded move frees the old shard tensor by tensor and fills the new one likewise, yet optimizers and
all-reduces want each kind of state as one flat tensor. On a Linux CPU both hold: memory is mapped when it is
first written, and whole pages are returned to the system in place (`HostMemory`). On a GPU the driver maps
and unmaps physical memory under a range of addresses (`device_pages`). Elsewhere a range is whole or not.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nereus.config.environment import gives_back_gpu_memory
from nereus.emu.device_pages import DeviceMemory, Driver
from nereus.emu.gpu_driver import gpu_driver

HUGE_BYTES = 2 << 20


class Memory(Protocol):
    """A range of pages. `flat` is all of it as bytes; only pages in use may be read or written."""

    flat: Tensor
    page_bytes: int

    def hold(self, first: int, last: int) -> None:
        """Pages [first, last) are in use from now on, and zero. Raises MemoryError when there is no room."""
        ...

    def release(self, first: int, last: int) -> None:
        """Give pages [first, last) back."""
        ...


class HostMemory:
    """Memory of a Linux process. Large ranges that are used as a whole come in huge pages, in which the
    first write, which a new shard always pays, costs a third.
    """

    page_bytes = mmap.PAGESIZE

    def __init__(self, num_bytes: int, *, whole: bool) -> None:
        """Reserve the addresses. Raises MemoryError when there are too few."""
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {num_bytes} bytes of address space: {error}") from error
        if whole and num_bytes >= HUGE_BYTES:
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.flat = torch.frombuffer(self._memory, dtype=torch.uint8)

    def hold(self, first: int, last: int) -> None:
        """See Memory: a page comes with the first write."""

    def release(self, first: int, last: int) -> None:
        """See Memory."""
        size = self.page_bytes
        self._memory.madvise(mmap.MADV_DONTNEED, first * size, (last - first) * size)


def mappable(device: torch.device) -> bool:
    """Whether parts of a range on this device can be given back."""
    if device.type == "cpu":
        return sys.platform == "linux"
    return device.type == "cuda" and gives_back_gpu_memory() and gpu_driver(device) is not None


@dataclass(eq=False)
class Pages:
    """`flat` is the range as bytes, zero at first. Only what is held may be read or written.

    `whole` says that all of it will be held at once. `driver` is the GPU's; by default the one that is there.
    """

    num_bytes: int
    device: torch.device
    whole: bool
    driver: Driver | None = None
    flat: Tensor = field(init=False)
    _memory: Memory | None = None
    _holders: np.ndarray[tuple[int], np.dtype[np.int32]] = field(init=False)

    def __post_init__(self) -> None:
        self._memory = self._reserve() if self.num_bytes else None
        if self._memory is None:
            self.flat = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
        else:
            self.flat = self._memory.flat
        self._holders = np.zeros(-(-self.num_bytes // self._page_bytes), dtype=np.int32)

    def _reserve(self) -> Memory | None:
        if self.driver is not None:
            return DeviceMemory(self.num_bytes, self.device, self.driver)
        if not mappable(self.device):
            return None
        if self.device.type == "cpu":
            return HostMemory(self.num_bytes, whole=self.whole)
        driver = gpu_driver(self.device)
        assert driver is not None, "the device is mappable"
        return DeviceMemory(self.num_bytes, self.device, driver)

    @property
    def _page_bytes(self) -> int:
        return mmap.PAGESIZE if self._memory is None else self._memory.page_bytes

    @property
    def releases(self) -> bool:
        """Whether `release` gives memory back."""
        return self._memory is not None

    def hold(self, lo: int, hi: int) -> None:
        """Bytes [lo, hi) are in use; what two parts share is in use until both are released.

        Raises MemoryError, and holds nothing, when the device has no room.
        """
        if self._memory is not None:
            self._memory.hold(*self._unheld(lo, hi))
        self._holders[lo // self._page_bytes : -(-hi // self._page_bytes)] += 1

    def release(self, lo: int, hi: int) -> None:
        """Give back the pages of bytes [lo, hi) that nothing else holds; held again they read as zeros."""
        assert self._memory is not None, "this device gives nothing back"
        self._holders[lo // self._page_bytes : -(-hi // self._page_bytes)] -= 1
        first, last = self._unheld(lo, hi)
        if first < last:
            self._memory.release(first, last)

    def vacate(self) -> None:
        """Give all of a range back that is held as a whole; until `occupy` nothing of it may be touched."""
        if self._memory is None:
            self.flat.untyped_storage().resize_(0)
            return
        assert self._holders.all(), "the range is held as a whole"
        self._memory.release(0, len(self._holders))

    def occupy(self) -> None:
        """Take the range up again for those who hold it. What it contains is undefined.

        Raises MemoryError, or torch's RuntimeError, when the device has no room.
        """
        if self._memory is None:
            self.flat.untyped_storage().resize_(self.num_bytes)
        else:
            self._memory.hold(0, len(self._holders))

    def _unheld(self, lo: int, hi: int) -> tuple[int, int]:
        """The pages of bytes [lo, hi) without a holder: only the first and the last can have another."""
        first, last = lo // self._page_bytes, -(-hi // self._page_bytes)
        while first < last and self._holders[first]:
            first += 1
        while first < last and self._holders[last - 1]:
            last -= 1
        return first, last
