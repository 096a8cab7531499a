"""Where a shard's numbers lie: one contiguous arena for each kind of state, with a view for every tensor.

Kinds: `theta` (weights), `master` (fp32 copy, only where weights are half precision), `exp_avg`,
`exp_avg_sq` (Adam), and `grad`. All arenas of a shard share one geometry, so one offset serves every kind,
and an optimizer step is a few elementwise operations on flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import get_args

import torch
from torch import Tensor

from nereus.emu import kinds
from nereus.emu.decoder import DType
from nereus.emu.layout import Piece, Shard

ALIGNMENT = 32  # elements; 64 bytes of the narrowest dtype, so that every view starts on a cache line
TORCH_DTYPE: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@lru_cache(maxsize=1024)
def offsets(shard: Shard) -> tuple[dict[str, int], int]:
    """The element offset of every physical tensor, and the arena's size in elements."""
    at, out = 0, {}
    for tensor in shard.tensors:
        out[tensor.name] = at
        at += -(-prod(tensor.shape) // ALIGNMENT) * ALIGNMENT
    return out, at


class Arena:
    """One kind's numbers: `flat`, a contiguous 1-D tensor, and a view of it for each physical tensor.

    Gaps between tensors and rows that no piece covers are zero and stay zero under elementwise updates.
    """

    def __init__(self, shard: Shard, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        starts, size = offsets(shard)
        self.shard = shard
        self.dtype = dtype
        self.device = torch.device(device)
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self.views: dict[str, Tensor] = {
            t.name: self.flat[starts[t.name] : starts[t.name] + prod(t.shape)].view(t.shape)
            for t in shard.tensors
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.views)

    def piece(self, piece: Piece) -> Tensor:
        """The view of this arena that a piece describes."""
        return self.views[piece.physical][tuple(slice(lo, hi) for lo, hi in piece.stored)]

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The arena's memory as flat tensors; one here, one for each tensor in a LooseArena."""
        return (self.flat,)

    @property
    def num_bytes(self) -> int:
        """Bytes that the arena occupies."""
        return self.flat.numel() * self.flat.element_size()


@dataclass(frozen=True)
class ShardState:
    """Theta and omega of one shard: the arenas by kind, all of one geometry."""

    shard: Shard
    arenas: dict[str, Arena]

    @classmethod
    def empty(
        cls, shard: Shard, kinds: Mapping[str, torch.dtype], device: torch.device | str = "cpu"
    ) -> ShardState:
        """Zeroed arenas for the given kinds and dtypes."""
        return cls(shard=shard, arenas={kind: Arena(shard, dtype, device) for kind, dtype in kinds.items()})

    def __getitem__(self, kind: str) -> Arena:
        return self.arenas[kind]

    @property
    def num_bytes(self) -> int:
        """Bytes over all kinds."""
        return sum(arena.num_bytes for arena in self.arenas.values())


def training_kinds(theta: torch.dtype) -> dict[str, torch.dtype]:
    """The arenas of a training shard with weights of this dtype: those that `kinds.training_kinds` names."""
    names: tuple[DType, ...] = get_args(DType)
    name = next(name for name in names if TORCH_DTYPE[name] == theta)
    return {kind.name: TORCH_DTYPE[kind.dtype] for kind in kinds.training_kinds(name)}
