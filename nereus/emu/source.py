"""The seam through which state enters from storage: boxes of logical tensors, by kind.

A Hugging Face folder, our own checkpoint, a torch DCP folder and a Megatron-style one are sources; a shard
fills itself from any of them by reading just the boxes that its pieces name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from nereus.emu.arena import ShardState
from nereus.emu.host_ring import HostRing
from nereus.emu.tensor import Box


class LogicalSource(Protocol):
    """Readable logical tensors. Reading is lazy: only the asked box is brought into memory."""

    def kinds(self) -> tuple[str, ...]:
        """The kinds of state present; at least `theta`."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        ...

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The box of one logical tensor in its stored dtype. Raises CheckpointError or ModelError if
        absent.
        """
        ...


def fill(state: ShardState, source: LogicalSource, kinds: Mapping[str, str]) -> None:
    """Copy into `state` the boxes its pieces name, casting to each arena's dtype.

    `kinds` maps a kind of the state to the kind of the source it is read from (`{"master": "theta"}` makes
    master weights from a plain model).
    """
    ring = HostRing.of(next(iter(state.arenas.values())).device)
    for kind, source_kind in kinds.items():
        arena = state[kind]
        for piece in arena.shard.pieces:
            read, target = source.read(source_kind, piece.logical, piece.box), arena.piece(piece)
            if ring is None:
                target.copy_(read)
            else:
                ring.put(read, target)
    if ring is not None:
        ring.finish()
