"""Reading another process's memory on the same Linux host: strided windows, `process_vm_readv`, leases.

A window is a strided piece of memory as six numbers: address, bytes of a run, and two levels of (count,
stride) around it. Both sides of a read are lists of windows; bytes flow in order from one to the other, so
the two sides may cut them differently. One system call takes at most 1024 runs a side.

A lease is a random word in the owner's memory. Who finds it there *after* a read knows that the owner had not
revoked what it lent, and that the process is the one that lent it, since process ids are used again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Window = tuple[int, int, int, int, int, int]  # address, run bytes, count, stride, count, stride (outer first)
Runs = tuple[NDArray[np.int64], NDArray[np.int64]]  # addresses, bytes
WINDOW_NUMBERS = 6
IOV_MAX = 1024
SET_PTRACER = 0x59616D61  # <linux/prctl.h>
CALL_BYTES = 16 << 20  # 2 ms of copying, so that a deadline is noticed
# A run costs its reader some 0.6 µs (measured, Linux 6.18), as long as copying 4 KiB takes.
SHORT_RUN_BYTES = 4096
FEW_RUNS = 16


class ReadFailed(Exception):
    """The kernel refused or the memory is not there; the text says which."""


def window(view: Tensor) -> Window | None:
    """The memory of a view; None where it has more than two levels of strides around a run."""
    width = view.element_size()
    run = width
    outer: list[tuple[int, int]] = []
    for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        if size == 1:
            continue
        if size == 0:
            return view.data_ptr(), 0, 1, 0, 1, 0
        step = stride * width
        if not outer and step == run:
            run *= size
        elif outer and step == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * size, outer[-1][1])
        elif len(outer) < 2:
            outer.append((size, step))
        else:
            return None
    (near, near_step), (far, far_step) = (*outer, (1, 0), (1, 0))[:2]
    return view.data_ptr(), run, far, far_step, near, near_step


def reads_well(one: Window) -> bool:
    """Whether a reader takes the window about as fast as one run; otherwise its owner had better pack it."""
    return one[1] >= SHORT_RUN_BYTES or one[2] * one[4] <= FEW_RUNS


def runs(windows: NDArray[np.int64]) -> Runs:
    """Every run of the windows [n, 6] in order."""
    address, size, far, far_step, near, near_step = windows.T
    counts = far * near
    if counts.max(initial=1) == 1:
        return address, size
    which = np.repeat(np.arange(len(windows)), counts)
    index = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = address[which] + index // near[which] * far_step[which] + index % near[which] * near_step[which]
    return starts, size[which]


def num_bytes(windows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of each window [n]."""
    sizes: NDArray[np.int64] = windows[:, 1] * windows[:, 2] * windows[:, 4]
    return sizes


@lru_cache(maxsize=1)
def _system_call() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    address, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, address, count, address, count, count]
    found: Callable[..., int] = call
    return found


def _read_once(pid: int, into: NDArray[np.int64], out: NDArray[np.int64]) -> int:
    call = _system_call()
    if call is None:
        raise ReadFailed("this system has no process_vm_readv")
    count = call(pid, into.ctypes.data, len(into), out.ctypes.data, len(out), 0)
    if count <= 0:
        number = ctypes.get_errno()
        raise ReadFailed(os.strerror(number) if count < 0 else "nothing could be read")
    return count


class _Side:
    """The runs of one side, from which any interval of the byte stream can be cut."""

    def __init__(self, found: Runs) -> None:
        self.starts, self.sizes = found
        self.ends = np.cumsum(self.sizes)

    def limit(self, at: int) -> int:
        """Where a call that begins at byte `at` of the stream must end."""
        first = int(np.searchsorted(self.ends, at, side="right"))
        return int(self.ends[min(first + IOV_MAX, len(self.ends)) - 1])

    def cut(self, lo: int, hi: int) -> NDArray[np.int64]:
        """The runs of bytes [lo, hi) as iovecs [n, 2]."""
        first = int(np.searchsorted(self.ends, lo, side="right"))
        last = int(np.searchsorted(self.ends, hi, side="left")) + 1
        out = np.stack([self.starts[first:last], self.sizes[first:last]], axis=1)
        skipped = lo - int(self.ends[first] - self.sizes[first])
        out[0] += (skipped, -skipped)
        out[-1, 1] -= int(self.ends[last - 1]) - hi
        return out


def read(pid: int, into: Runs, out: Runs, *, check: Callable[[], None]) -> None:
    """Copy the runs `out` of process `pid` into ours, in order; both sides have equally many bytes.

    `check` is called between system calls and may raise. Raises ReadFailed.
    """
    ours, theirs = _Side(into), _Side(out)
    at, total = 0, int(ours.ends[-1]) if len(ours.ends) else 0
    while at < total:
        check()
        end = min(at + CALL_BYTES, ours.limit(at), theirs.limit(at))
        at += _read_once(pid, ours.cut(at, end), theirs.cut(at, end))


def let_others_read() -> None:
    """Permit other processes of this user to read this one, where Yama would only let ancestors."""
    if sys.platform == "linux":
        any_process = ctypes.c_ulong(-1)
        ctypes.CDLL(None).prctl(SET_PTRACER, any_process, 0, 0, 0)  # refused without Yama, and needless then


@lru_cache(maxsize=1)
def host() -> int:
    """Tells hosts and process-id namespaces apart: within one, a process id names one process. 0: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
    return (zlib.crc32(boot) & 0x7FFFFFFF) << 32 | namespace & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Card:
    """Where the lease of a process is found: its host, process id, the word's address, the word."""

    host: int
    pid: int
    address: int
    word: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Card:
        """From the four numbers of `numbers`."""
        return cls(*numbers)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As they travel."""
        return self.host, self.pid, self.address, self.word

    def check(self) -> None:
        """Raise ReadFailed unless the lease can be read and holds."""
        if not self.host or self.host != host():
            raise ReadFailed("it is on another host")
        found = np.zeros(1, dtype=np.int64)
        _read_once(self.pid, _iovec(found.ctypes.data, 8), _iovec(self.address, 8))
        if int(found[0]) != self.word:
            raise ReadFailed("it has revoked its lease, or its process has ended")


NO_CARD = Card(host=0, pid=0, address=0, word=0)


def _iovec(address: int, size: int) -> NDArray[np.int64]:
    return np.array([[address, size]], dtype=np.int64)


@dataclass(eq=False)
class Lease:
    """This process's promise that lent memory is as it was lent; it ends with `revoke`."""

    _word: Tensor = field(default_factory=lambda: torch.tensor([_random_word()]))

    @property
    def card(self) -> Card:
        """What others need to check it."""
        return Card(host=host(), pid=os.getpid(), address=self._word.data_ptr(), word=int(self._word))

    def revoke(self) -> None:
        """Before lent memory is freed or changed without its readers' word that they are done."""
        self._word.zero_()


def _random_word() -> int:
    return int.from_bytes(os.urandom(8), "little", signed=True) or 1
