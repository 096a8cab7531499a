"""Where a shard's numbers lie: one contiguous arena for each kind of state, with a view for every tensor.

Kinds: `theta` (weights), `master` (fp32 copy, only where weights are half precision), `exp_avg`,
`exp_avg_sq` (Adam), and `grad`. All arenas of a shard share one geometry, so one offset serves every kind,
and an optimizer step is a few elementwise operations on flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import get_args

import torch
from torch import Tensor

from nereus.emu import kinds
from nereus.emu.decoder import DType
from nereus.emu.layout import Piece, Shard
from nereus.emu.pages import Pages

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
    `starts` says at which element each tensor begins. `views` are the tensors that are allocated: all of
    them, except while a bounded move fills or empties the arena; none while it is vacated.
    """

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        allocated: bool = True,
    ) -> None:
        self.starts, size = offsets(shard)
        self.shard = shard
        self.dtype = dtype
        self.device = torch.device(device)
        self._pages = Pages(size * dtype.itemsize, self.device, whole=allocated)
        self.flat = self._pages.flat.view(dtype)
        self._all: dict[str, Tensor] = {
            t.name: self.flat[at : at + prod(t.shape)].view(t.shape)
            for t, at in zip(shard.tensors, self.starts.values(), strict=True)
        }
        self.views: dict[str, Tensor] = {}
        if allocated:
            self.allocate(self._all)

    def part(self, shard: Shard) -> Arena:
        """The tensors of `shard`, which lie here one after the other, as an arena over the same memory."""
        starts, size = offsets(shard)
        first = self.starts[shard.tensors[0].name] if shard.tensors else 0
        inside = {name: self.starts[name] - first for name in starts}
        assert inside == starts, "the tensors of a part follow one another"
        out = copy(self)
        out.shard, out.starts, out.flat = shard, starts, self.flat[first : first + size]
        out._all = {name: self._all[name] for name in starts}
        out.views = {name: self.views[name] for name in starts if name in self.views}
        return out

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.views)

    def piece(self, piece: Piece) -> Tensor:
        """The view of this arena that a piece describes."""
        return self.views[piece.physical][tuple(slice(lo, hi) for lo, hi in piece.stored)]

    @property
    def releases(self) -> bool:
        """Whether the tensors can be freed one by one."""
        return self._pages.releases

    def allocate(self, names: Iterable[str]) -> None:
        """Let these tensors be used; they are zero. Each may be allocated once."""
        for name in names:
            assert name not in self.views, f"{name} is allocated already"
            self.views[name] = self._all[name]
            self._pages.hold(*self._span(name))

    def free(self, names: Iterable[str]) -> None:
        """Give the memory of these tensors back to the system, whoever still has a view of it."""
        for name in names:
            del self.views[name]
            self._pages.release(*self._span(name))

    def vacate(self) -> None:
        """Give all memory back while the numbers lie elsewhere; the tensors keep their place."""
        self.views = {}
        self._pages.vacate()

    def occupy(self) -> None:
        """Take the memory up again; what it contains is undefined. Raises MemoryError, or torch's
        RuntimeError, without room.
        """
        self._pages.occupy()
        self.views = dict(self._all)

    def _span(self, name: str) -> tuple[int, int]:
        view = self._all[name]
        lo = view.data_ptr() - self.flat.data_ptr()
        return lo, lo + view.numel() * view.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes that the arena occupies; without the gaps while it is not allocated as a whole."""
        if len(self.views) == len(self._all):
            return self.flat.numel() * self.flat.element_size()
        return sum(view.numel() * view.element_size() for view in self.views.values())


@dataclass(frozen=True)
class ShardState:
    """Theta and omega of one shard: the arenas by kind, all of one geometry.

    Where units share an optimizer, `shard` is that of theta and the other arenas hold a slice of it: each
    arena knows its own `shard`.
    """

    shard: Shard
    arenas: dict[str, Arena]

    @classmethod
    def empty(
        cls,
        shard: Shard,
        kinds: Mapping[str, torch.dtype],
        device: torch.device | str = "cpu",
        omega: Shard | None = None,
        *,
        allocated: bool = True,
    ) -> ShardState:
        """Zeroed arenas for the given kinds and dtypes; those of all kinds but theta are of `omega`.

        A bounded move wants them not `allocated`, and does that itself.
        """
        arenas = {
            kind: Arena(
                shard if kind == "theta" or omega is None else omega, dtype, device, allocated=allocated
            )
            for kind, dtype in kinds.items()
        }
        return cls(shard=shard, arenas=arenas)

    def part(self, shard: Shard) -> ShardState:
        """The same with only these tensors of theta, over the same memory; the other kinds stay."""
        return ShardState(shard=shard, arenas={**self.arenas, "theta": self.arenas["theta"].part(shard)})

    def split(self) -> tuple[ShardState, ShardState]:
        """Theta, and all other kinds, as states of their own over the same arenas."""
        omega = {kind: arena for kind, arena in self.arenas.items() if kind != "theta"}
        theta = ShardState(shard=self.shard, arenas={"theta": self.arenas["theta"]})
        return theta, ShardState(shard=next(iter(omega.values())).shard, arenas=omega)

    def joined(self, omega: ShardState) -> ShardState:
        """This theta with the other kinds of `omega`."""
        return ShardState(shard=self.shard, arenas={"theta": self.arenas["theta"], **omega.arenas})

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
