"""A range of a GPU's addresses under which physical memory is mapped and unmapped in pages.

    reserve addresses ─▶ hold: create memory ─▶ map ─▶ zero        release: unmap ─▶ free the memory

What CUDA calls virtual memory management, and HIP has too. Memory under an address that is in use stays; so
an arena keeps its one flat tensor while a bounded move empties it. Kernels know nothing of it, but whoever
releases must know that the device is done with the part: the driver does not wait.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

SMALL_ARENA_BYTES = 512 << 20
LARGE_PAGE_BYTES = 16 << 20  # a call to the driver takes tens of microseconds


class Driver(Protocol):
    """Physical memory and addresses of one GPU; both come in multiples of `granularity`."""

    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """The first of so many addresses with nothing under them. Raises MemoryError."""
        ...

    def map(self, address: int, num_bytes: int) -> int:
        """Put fresh physical memory under the addresses; its handle. Raises MemoryError."""
        ...

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        """Take the memory from under the addresses and free it."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Give up the addresses, under which nothing is mapped any more."""
        ...

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """The addresses as bytes, which keep `owner`; the first page is mapped."""
        ...

    def trim(self) -> None:
        """Let torch's allocator give what it does not use to the driver."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...


class _Range:
    """Addresses and what is mapped under them; freed when the last tensor over it is gone."""

    def __init__(self, driver: Driver, address: int, num_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.handles: dict[int, int] = {}  # by page
        weakref.finalize(self, _free, driver, address, num_bytes, self.handles, page_bytes)


def _free(driver: Driver, address: int, num_bytes: int, handles: dict[int, int], page_bytes: int) -> None:
    if handles:
        driver.synchronize()  # kernels that were given the tensor may still run
    for page, handle in handles.items():
        driver.unmap(address + page * page_bytes, page_bytes, handle)
    handles.clear()
    driver.free(address, num_bytes)


def page_size(num_bytes: int, granularity: int) -> int:
    """Bytes of a page of a range: what the driver can map, or more where there would be very many."""
    wanted = LARGE_PAGE_BYTES if num_bytes > SMALL_ARENA_BYTES else granularity
    return -(-wanted // granularity) * granularity


class DeviceMemory:
    """See `pages.Memory`."""

    def __init__(self, num_bytes: int, device: torch.device, driver: Driver) -> None:
        """Reserve the addresses. Raises MemoryError when there are too few."""
        self.page_bytes = page_size(num_bytes, driver.granularity)
        whole = -(-num_bytes // self.page_bytes) * self.page_bytes
        self._driver = driver
        self._range = _Range(driver, driver.reserve(whole), whole, self.page_bytes)
        self._range.handles[0] = self._map(0)  # a tensor is made over memory that is there
        self.flat = driver.tensor(self._range.address, whole, self._range)[:num_bytes]
        self._unmap(0)

    def hold(self, first: int, last: int) -> None:
        """See Memory. The zeros are written in the current stream."""
        mapped: list[int] = []
        try:
            for page in range(first, last):
                self._range.handles[page] = self._map(page)
                mapped.append(page)
        except MemoryError:
            for page in mapped:
                self._unmap(page)
            raise
        if first < last:
            self.flat[first * self.page_bytes : last * self.page_bytes].zero_()

    def release(self, first: int, last: int) -> None:
        """See Memory. The device is done with these pages."""
        for page in range(first, last):
            self._unmap(page)

    def _map(self, page: int) -> int:
        address = self._range.address + page * self.page_bytes
        try:
            return self._driver.map(address, self.page_bytes)
        except MemoryError:
            self._driver.trim()
            return self._driver.map(address, self.page_bytes)

    def _unmap(self, page: int) -> None:
        handle = self._range.handles.pop(page)
        self._driver.unmap(self._range.address + page * self.page_bytes, self.page_bytes, handle)
