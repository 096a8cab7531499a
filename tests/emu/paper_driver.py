"""A GPU's virtual memory on paper: process memory, with every rule of the driver checked."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

JUNK, GONE = 0xA5, 0xDD  # fresh memory is not zero; memory that was taken away is neither


class Block(bytearray):
    """Keeps what a tensor over it was made for."""

    owner: object = None


@dataclass(eq=False)
class PaperDriver:
    """`room_bytes` is the physical memory; `cached_bytes` of it are torch's until it is told to trim."""

    granularity: int = 4096
    room_bytes: int = 1 << 40
    cached_bytes: int = 0
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address: bytes, handle
    reserved: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = 0
    synchronized: int = 0

    def __post_init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._lock = threading.RLock()  # ranks are threads, and the end of a range may come inside a call
        self._handles = count(1)

    @property
    def mapped_bytes(self) -> int:
        with self._lock:
            return sum(size for size, _ in self.mapped.values())

    def reserve(self, num_bytes: int) -> int:
        with self._lock:
            assert num_bytes % self.granularity == 0
            block = Block(b"\xdd" * num_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(block))
            self._blocks[address] = block
            self.reserved[address] = num_bytes
            return address

    def map(self, address: int, num_bytes: int) -> int:
        with self._lock:
            base = self._base(address)
            assert (address - base) % self.granularity == 0 == num_bytes % self.granularity
            assert address + num_bytes <= base + self.reserved[base], "beyond the range"
            assert address not in self.mapped, "mapped twice"
            if self.mapped_bytes + self.cached_bytes + num_bytes > self.room_bytes:
                raise MemoryError("on paper there is no more")
            ctypes.memset(address, JUNK, num_bytes)
            self.mapped[address] = num_bytes, next(self._handles)
            self.peak_bytes = max(self.peak_bytes, self.mapped_bytes)
            return self.mapped[address][1]

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        with self._lock:
            assert self.mapped.pop(address) == (num_bytes, handle), "unmapped as it was mapped"
            ctypes.memset(address, GONE, num_bytes)

    def free(self, address: int, num_bytes: int) -> None:
        with self._lock:
            assert self.reserved.pop(address) == num_bytes
            assert not any(address <= at < address + num_bytes for at in self.mapped), "still mapped"

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        assert address in self.mapped, "a tensor is made over memory that is there"
        block = self._blocks.pop(address)
        block.owner = owner
        return torch.frombuffer(block, dtype=torch.uint8)

    def trim(self) -> None:
        self.cached_bytes = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def _base(self, address: int) -> int:
        return max(at for at in self.reserved if at <= address)
