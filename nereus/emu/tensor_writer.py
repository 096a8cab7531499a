"""Streaming writing of a safetensors file: one tensor in memory at a time, checksummed as it is written.

The safetensors library wants every tensor of a file in memory at once. The format is 8 bytes of header
length, a JSON header, and the tensors' bytes back to back, so names, shapes and dtypes suffice to write the
header first and the numbers as they come.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from nereus.emu.host_ring import HostRing

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A tensor to write: `load` brings its numbers, of this shape and dtype, from any device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's numbers."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """Size and CRC-32 of a file: what a later reader compares."""

    size_bytes: int
    crc32: int


def write_tensors(path: Path, tensors: Sequence[Outgoing], ring: HostRing | None = None) -> FileSum:
    """Write a safetensors file, flush it to the disk, and return its size and checksum.

    Wider dtypes go first so that every tensor is aligned to its own element size. Tensors of a GPU come
    through its `ring`: one is written while the next is on its way.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        end = at + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    assert len(header) == len(ordered) + 1, "two tensors of one file share a name"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    crc = size = 0
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            crc, size = zlib.crc32(chunk, crc), size + file.write(chunk)
        for raw in _bytes(ordered, ring):
            crc, size = zlib.crc32(raw, crc), size + file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(size_bytes=size, crc32=crc)


def sum_file(path: Path, chunk_bytes: int = 1 << 22) -> FileSum:
    """Size and checksum of a file as it lies on the disk. Raises OSError when it cannot be read."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return FileSum(size_bytes=size, crc32=crc)


def write_text(path: Path, text: str) -> FileSum:
    """Write a small file and flush it to the disk."""
    raw = text.encode()
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(size_bytes=len(raw), crc32=zlib.crc32(raw))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename inside it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes(tensors: Sequence[Outgoing], ring: HostRing | None) -> Iterator[memoryview]:
    """The bytes of all tensors one after the other, in pieces that are good until the next is asked for."""
    loaded = (_load(tensor) for tensor in tensors if tensor.num_bytes)
    for numbers in loaded if ring is None else ring.get(loaded):
        yield numbers.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _load(tensor: Outgoing) -> Tensor:
    numbers = tensor.load().detach()
    assert tuple(numbers.shape) == tensor.shape, (
        f"{tensor.name}: {tuple(numbers.shape)} is not {tensor.shape}"
    )
    assert numbers.dtype == tensor.dtype, f"{tensor.name}: {numbers.dtype} is not {tensor.dtype}"
    return numbers
