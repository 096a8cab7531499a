"""What units that share an optimizer (ZeRO-1) exchange in a step: slices of gradients and of new weights.

    gradients of the shard --> one reduce a slice, to the unit that has it --> AdamW on the slice
    weights of the shard  <-- one broadcast a slice, from the unit that has it <--'

A slice is packed into a buffer of its own, so that beside the shard one slice is held at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nereus.emu.arena import Arena
from nereus.emu.layout import Layout, Piece, Position, Shard, shard_at
from nereus.emu.tensor import Box, ModelSpec
from nereus.emu.unit_groups import UnitGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Box `stored` of a physical tensor of the shard is `piece` of a slice."""

    stored: Box
    piece: Piece


def slices_of(model: ModelSpec, layout: Layout, position: Position, num_slices: int) -> tuple[Shard, ...]:
    """The slices of the shard at a position, by unit."""
    at = [replace(position, slice=index) for index in range(num_slices)]
    return tuple(shard_at(model, layout.tp, layout.layers, place, num_slices, layout.ep) for place in at)


def spans(shard: Shard, part: Shard) -> tuple[Span, ...]:
    """Where the shard stores each piece of its slice `part`."""
    return tuple(Span(stored=_within(shard, piece), piece=piece) for piece in part.pieces)


def _within(shard: Shard, piece: Piece) -> Box:
    for whole in shard.pieces:
        if whole.physical != piece.physical or whole.logical != piece.logical:
            continue
        if all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(whole.box, piece.box, strict=True)):
            return tuple(
                (start + lo - a, start + hi - a)
                for (start, _), (a, _), (lo, hi) in zip(whole.stored, whole.box, piece.box, strict=True)
            )
    raise AssertionError(f"{piece} is no part of the shard")


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The slices of one shard, and the group of the units that have one each, in their order."""

    parts: tuple[Shard, ...]
    spans: tuple[tuple[Span, ...], ...]
    groups: UnitGroups

    @classmethod
    def of(cls, model: ModelSpec, layout: Layout, shard: Shard, groups: UnitGroups) -> Slices:
        """For a shard of `model` under `layout`."""
        parts = slices_of(model, layout, shard.position, groups.dp_size)
        return cls(parts=parts, spans=tuple(spans(shard, part) for part in parts), groups=groups)

    @property
    def mine(self) -> int:
        """Which slice this rank has."""
        return 0 if self.groups.dp is None else dist.get_rank(self.groups.dp)

    @property
    def own(self) -> Shard:
        """This rank's slice."""
        return self.parts[self.mine]

    def pack(self, arena: Arena, index: int) -> Arena:
        """A copy of a slice of the shard's arena."""
        out = Arena(self.parts[index], arena.dtype, arena.device)
        for span in self.spans[index]:
            out.piece(span.piece).copy_(_at(arena, span))
        return out

    def unpack(self, part: Arena, index: int, arena: Arena) -> None:
        """Write a slice into the shard's arena."""
        for span in self.spans[index]:
            _at(arena, span).copy_(part.piece(span.piece))

    def reduce(self, grad: Arena) -> Arena:
        """This rank's slice of the gradients, summed over the units. Collective."""
        mine = self.mine
        kept: Arena | None = None
        for index in range(len(self.parts)):
            part = self.pack(grad, index)
            if self.groups.dp is not None:
                dist.reduce(part.flat, group_dst=index, group=self.groups.dp)
            kept = part if index == mine else kept
        assert kept is not None, "a unit has a slice"
        return kept

    def spread(self, part: Arena, theta: Arena) -> None:
        """Write all slices of the new weights into `theta`; `part` is this rank's. Collective."""
        mine = self.mine
        for index, shard in enumerate(self.parts):
            one = part if index == mine else Arena(shard, theta.dtype, theta.device)
            if self.groups.dp is not None:
                dist.broadcast(one.flat, group_src=index, group=self.groups.dp)
            self.unpack(one, index, theta)


def _at(arena: Arena, span: Span) -> torch.Tensor:
    return arena[span.piece.physical][tuple(slice(lo, hi) for lo, hi in span.stored)]
