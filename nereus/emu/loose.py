"""An arena whose tensors are allocated one by one, so that a bounded move can free them one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from nereus.emu.arena import Arena, ShardState
from nereus.emu.layout import Shard


class LooseArena(Arena):
    """An Arena without `flat`: `views` holds the tensors that are allocated at the moment."""

    def __init__(
        self,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        allocated: bool = True,
    ) -> None:
        self.shard = shard
        self.dtype = dtype
        self.device = torch.device(device)
        self.views: dict[str, Tensor] = {}
        self._shapes = {tensor.name: tensor.shape for tensor in shard.tensors}
        if allocated:
            self.allocate(self._shapes)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The allocated tensors as flat ones, in storage order."""
        return tuple(self.views[name].view(-1) for name in self._shapes if name in self.views)

    def allocate(self, names: Iterable[str]) -> None:
        """Allocate these tensors, zeroed."""
        for name in names:
            assert name not in self.views, f"{name} is allocated already"
            self.views[name] = torch.zeros(self._shapes[name], dtype=self.dtype, device=self.device)

    def free(self, names: Iterable[str]) -> None:
        """Free these tensors; views of them that others hold keep the memory."""
        for name in names:
            del self.views[name]

    @property
    def num_bytes(self) -> int:
        """Bytes that the allocated tensors occupy."""
        return sum(prod(view.shape) * view.element_size() for view in self.views.values())


def loose_state(
    shard: Shard,
    kinds: Mapping[str, torch.dtype],
    device: torch.device | str = "cpu",
    *,
    allocated: bool = True,
) -> ShardState:
    """A shard's state in loose arenas."""
    return ShardState(
        shard=shard,
        arenas={kind: LooseArena(shard, dtype, device, allocated=allocated) for kind, dtype in kinds.items()},
    )
