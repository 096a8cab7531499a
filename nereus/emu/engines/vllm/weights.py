"""The shard's weights as tensors of a checkpoint: what vLLM's loader reads, rank by rank.

The loader takes whole tensors by their Hugging Face names and cuts this rank's part out of each. A rank
holds that part already, so it hands over a tensor of the whole shape of which only its part is written:
nothing is sent, and on a CPU the rest is never touched. Only a vocabulary that the two sides pad differently
is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.arena import Arena
from nereus.emu.engine_limits import VOCAB_MULTIPLE
from nereus.emu.layout import Layout, Piece
from nereus.emu.tensor import Interval, ModelSpec, Vocab, whole
from nereus.emu.unit_groups import UnitGroups


def checkpoint_tensors(
    model: ModelSpec, arena: Arena, gathered: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor of the whole shape) for every logical tensor of the shard, layer after layer.

    Elements outside this rank's boxes are undefined. Tensors that the rank holds whole are views of the
    arena; those in `gathered` are given as they are.
    """
    pieces: dict[str, list[Piece]] = {}
    for piece in arena.shard.pieces:
        pieces.setdefault(piece.logical, []).append(piece)
    for spec in model.tensors:
        if spec.name in gathered:
            yield spec.name, gathered[spec.name]
        elif spec.name in pieces:
            yield spec.name, _whole_shape(spec.shape, pieces[spec.name], arena)


def _whole_shape(shape: tuple[int, ...], pieces: list[Piece], arena: Arena) -> Tensor:
    if len(pieces) == 1 and pieces[0].box == whole(shape):
        return arena.piece(pieces[0])
    tensor = torch.empty(shape, dtype=arena.dtype, device=arena.device)
    for piece in pieces:
        tensor[tuple(slice(lo, hi) for lo, hi in piece.box)] = arena.piece(piece)
    return tensor


def gather_vocabularies(model: ModelSpec, arena: Arena, groups: UnitGroups) -> dict[str, Tensor]:
    """Whole tensors of the vocabulary where vLLM's ranks need rows that ours lack. Collective over tp."""
    out: dict[str, Tensor] = {}
    if groups.tp is None:
        return out
    for spec in model.tensors:
        here = isinstance(spec.cut, Vocab) and spec.name in arena.views
        if here and needs_gather(model, groups.layout, spec.name):
            mine = arena[spec.name]
            parts = mine.new_empty(groups.layout.tp * mine.shape[0], *mine.shape[1:])
            dist.all_gather_into_tensor(parts, mine.contiguous(), group=groups.tp)
            out[spec.name] = parts[: spec.shape[0]]
    return out


def needs_gather(model: ModelSpec, layout: Layout, name: str) -> bool:
    """Whether some position of the layout lacks rows that vLLM's rank at that position serves."""
    spec = model.by_name[name]
    for position in range(layout.tp):
        lo, hi = served_rows(spec.shape[0], layout.tp, position)
        (have_lo, have_hi), *_ = spec.cut.box(spec.shape, layout.tp, position)
        if lo < hi and not have_lo <= lo <= hi <= have_hi:
            return True
    return False


def served_rows(vocab_size: int, tp: int, position: int) -> Interval:
    """The rows of the vocabulary that vLLM's tensor-parallel rank at `position` of `tp` serves."""
    rows = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // tp
    return min(vocab_size, position * rows), min(vocab_size, (position + 1) * rows)
