"""Offline resharding: any source of logical tensors, written as a checkpoint of ours for a chosen layout.

One box is in memory at a time, whatever the size of the model. The result is the same checkpoint that a unit
of that layout would write, so every layout reads it; the chosen one reads whole files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE
from nereus.emu.checkpoint.commit import begin, commit
from nereus.emu.checkpoint.control import Control
from nereus.emu.checkpoint.ownership import owned_pieces
from nereus.emu.checkpoint.part import Entry, Part
from nereus.emu.layout import Layout, Piece, Position, Rank
from nereus.emu.source import LogicalSource
from nereus.emu.tensor import Box, ModelSpec, box_shape, box_size
from nereus.emu.tensor_writer import Outgoing, write_tensors


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What will be written: for every rank of the layout, the boxes it owns, in the kinds' dtypes."""

    model: str
    spec: ModelSpec
    layout: Layout
    dtypes: Mapping[str, torch.dtype]
    owned: Mapping[Rank, tuple[Piece, ...]]

    @classmethod
    def of(
        cls,
        source: LogicalSource,
        spec: ModelSpec,
        layout: Layout,
        *,
        model: str,
        theta: str | None = None,
        weights_only: bool = False,
    ) -> Conversion:
        """Plan it. `theta` ("bf16", "fp16", "fp32") casts the weights; other kinds keep their dtype."""
        kinds = ("theta",) if weights_only else source.kinds()
        first = spec.tensors[0]
        corner: Box = tuple((0, 1) for _ in first.shape)
        dtypes = {kind: source.read(kind, first.name, corner).dtype for kind in kinds}
        if theta is not None:
            dtypes["theta"] = TORCH_DTYPE[theta]
        return cls(model=model, spec=spec, layout=layout, dtypes=dtypes, owned=owned_pieces(spec, layout))

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element over all kinds."""
        return sum(dtype.itemsize for dtype in self.dtypes.values())

    def num_bytes(self, rank: Rank) -> int:
        """Bytes that go into a rank's part."""
        return sum(box_size(piece.box) for piece in self.owned[rank]) * self.bytes_per_element

    @property
    def total_bytes(self) -> int:
        """Bytes over all parts: one replica's state."""
        return sum(self.num_bytes(rank) for rank in self.layout.ranks)

    def position(self, rank: Rank) -> Position:
        """Where the rank sits."""
        return self.layout.position(rank)


def convert(
    source: LogicalSource,
    conversion: Conversion,
    root: Path | str,
    control: Control,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write the checkpoint and return its folder, `root/step-<step>`. `on_bytes` hears of every box written.

    Nothing appears under the final name before everything is written and flushed. Raises CheckpointError or
    ModelError when the source fails, OSError when the disk refuses.
    """
    folder = begin(root, control.step)
    target = folder / conversion.model
    target.mkdir(parents=True)
    parts: list[Part] = []
    for place, rank in enumerate(conversion.layout.ranks):
        entries = [
            Entry(kind=kind, logical=piece.logical, box=piece.box)
            for kind in conversion.dtypes
            for piece in conversion.owned[rank]
        ]
        outgoing = [_outgoing(source, entry, conversion.dtypes[entry.kind], on_bytes) for entry in entries]
        name = f"part-{place:05d}.safetensors"
        parts.append(
            Part(
                model=conversion.model,
                file=name,
                sum=write_tensors(target / name, outgoing),
                dtypes=tuple(
                    (kind, str(dtype).removeprefix("torch.")) for kind, dtype in conversion.dtypes.items()
                ),
                entries=tuple(entries),
            )
        )
    return commit(folder, {conversion.model: conversion.spec}, parts, control)


def _outgoing(
    source: LogicalSource, entry: Entry, dtype: torch.dtype, on_bytes: Callable[[int], None]
) -> Outgoing:
    def load() -> Tensor:
        numbers = source.read(entry.kind, entry.logical, entry.box).to(dtype)
        on_bytes(numbers.numel() * dtype.itemsize)
        return numbers

    return Outgoing(name=entry.key, shape=box_shape(entry.box), dtype=dtype, load=load)
