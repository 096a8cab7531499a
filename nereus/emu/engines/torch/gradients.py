"""What must happen to a shard's gradients between the backward pass and the optimizer.

1. `complete`: a rank's gradient of a shared weight is a part where each holder saw other heads or another
   stage's use of it; the table of `partial_gradients` says over which group the parts are summed.
2. Ranks along ep and cp see other tokens: the gradients of what they hold alike are summed over them, those
   of experts along cp alone (`copy_spans`).
3. The data-parallel sum over units is one all-reduce of the whole arena; losses divide by global counts.
4. `squared_norm` counts each logical element once over the unit: replicas and ties have one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.arena import Arena, offsets
from nereus.emu.decoder import ROUTER
from nereus.emu.layout import Layout, PhysicalTensor, Piece, Position, Shard
from nereus.emu.lora import is_adapter
from nereus.emu.tensor import KvHeads, ModelSpec, Replicated, TensorSpec
from nereus.emu.unit_groups import UnitGroups

SharedBy = Literal["kv", "tp", "tie"]
# Replicated, but applied to each rank's own heads, or to its own part of every expert.
PER_RANK = ("q_norm.weight", "k_norm.weight", ROUTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGradient:
    """Rows [lo, hi) of a physical tensor whose gradient is a part: the whole is the sum over `group`."""

    physical: str
    rows: tuple[int, int]
    group: SharedBy


def partial_gradients(model: ModelSpec, layout: Layout, shard: Shard) -> tuple[PartialGradient, ...]:
    """Every partial gradient of one shard, in storage order; the same sequence on all ranks of its group."""
    found: list[PartialGradient] = []
    for piece in shard.pieces:
        spec = model.by_name[piece.logical]
        group: SharedBy | None = None
        if isinstance(spec.cut, KvHeads) and spec.cut.split_group == 1 and layout.tp > model.num_kv_heads:
            group = "kv"
        elif layout.tp > 1 and (spec.name.endswith(PER_RANK) or _is_shared_factor(spec)):
            group = "tp"
        elif spec.also == "last" and layout.pp > 1 and shard.position.pp in (0, layout.pp - 1):
            group = "tie"
        if group is not None:
            found.append(PartialGradient(physical=piece.physical, rows=piece.stored[0], group=group))
    return tuple(found)


def _is_shared_factor(spec: TensorSpec) -> bool:
    """Whether each rank sees its own part of the other factor of an adapter: `lora` tells why."""
    return isinstance(spec.cut, Replicated) and is_adapter(spec.name)


def complete(grad: Arena, parts: Sequence[PartialGradient], groups: UnitGroups) -> None:
    """Sum the partial gradients in place: one all-reduce a group, whatever the number of tensors."""
    for name, group in (("kv", groups.kv), ("tp", groups.tp), ("tie", groups.tie)):
        views = [grad[p.physical][p.rows[0] : p.rows[1]] for p in parts if p.group == name]
        if not views or group is None:
            continue
        together = torch.cat([view.reshape(-1) for view in views])
        dist.all_reduce(together, group=group)
        for view, total in zip(views, torch.split(together, [view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpan:
    """Elements [lo, hi) of the arena that ranks along `axes` hold alike."""

    lo: int
    hi: int
    axes: Literal["copies", "cp"]


def copy_spans(model: ModelSpec, layout: Layout, shard: Shard) -> tuple[CopySpan, ...]:
    """The arena by the groups over which gradients are summed; equal on all ranks of such a group."""
    if layout.ep * layout.cp == 1:
        return ()
    starts, total = offsets(shard)
    ends = [*(starts[tensor.name] for tensor in shard.tensors[1:]), total]
    spans: list[CopySpan] = []
    for tensor, end in zip(shard.tensors, ends, strict=True):
        is_experts = any(model.by_name[piece.logical].experts for piece in tensor.pieces)
        axes: Literal["copies", "cp"] = "cp" if is_experts else "copies"
        span = CopySpan(lo=starts[tensor.name], hi=end, axes=axes)
        if spans and spans[-1].axes == axes:
            span = CopySpan(lo=spans.pop().lo, hi=end, axes=axes)
        spans.append(span)
    return tuple(spans)


def sum_copies(flat: Tensor, spans: Sequence[CopySpan], groups: UnitGroups) -> None:
    """Sum the gradients of what ranks of the unit hold alike, in place. Collective over them."""
    for span in spans:
        group = groups.copies if span.axes == "copies" else groups.cp
        if group is not None:
            dist.all_reduce(flat[span.lo : span.hi], group=group)


def owned_spans(model: ModelSpec, layout: Layout, shard: Shard) -> tuple[tuple[int, int], ...]:
    """Intervals of the arena whose elements this position counts; over a unit every logical element once."""
    starts, _ = offsets(shard)
    spans: list[tuple[int, int]] = []
    for tensor in shard.tensors:
        for piece in tensor.pieces:
            if not _owns(model, layout, shard.position, piece):
                continue
            lo, hi = _span(starts[tensor.name], tensor, piece)
            if spans and spans[-1][1] == lo:
                spans[-1] = (spans[-1][0], hi)
            else:
                spans.append((lo, hi))
    return tuple(spans)


def _span(start: int, tensor: PhysicalTensor, piece: Piece) -> tuple[int, int]:
    """A piece as an interval of the arena: it covers whole rows, since every fused part has its own rows."""
    row = prod(tensor.shape[1:])
    assert all(side == (0, n) for side, n in zip(piece.stored[1:], tensor.shape[1:], strict=True)), (
        f"piece {piece} does not cover whole rows"
    )
    return start + piece.stored[0][0] * row, start + piece.stored[0][1] * row


def _owns(model: ModelSpec, layout: Layout, position: Position, piece: Piece) -> bool:
    spec = model.by_name[piece.logical]
    if spec.also == "last" and layout.pp > 1 and position.pp != 0:
        return False
    if position.cp or (position.ep and not spec.experts):
        return False
    if isinstance(spec.cut, Replicated):
        return position.tp == 0
    if isinstance(spec.cut, KvHeads) and spec.cut.split_group == 1 and layout.tp > model.num_kv_heads:
        return position.tp % (layout.tp // model.num_kv_heads) == 0
    return True


def squared_norm(flat: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Sum of squares over the spans, in float64; a scalar."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for lo, hi in spans:
        for part in torch.split(flat[lo:hi], BLOCK):
            wide = part.double()
            total += torch.dot(wide, wide)
    return total


BLOCK = 1 << 16  # elements widened to float64 at once, so that they stay in cache
