"""Logical tensors and the rules by which tensor parallelism cuts them. Cuts are boxes.

A *logical* tensor is unfused and unpadded and is addressed by global coordinates. A *cut* says which box of
it the holder at some position of the tensor-parallel axis needs, and how many rows the holder stores (more
than the box where a vocabulary is padded). Expert parallelism divides one more dim of the box, the first of
a tensor that counts experts; context parallelism divides no tensor. Everything above works on boxes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, Protocol

Interval = tuple[int, int]
Box = tuple[Interval, ...]
Place = int | Literal["first", "last"]


def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers a tensor of this shape."""
    return tuple((0, n) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The extent of a box in every dimension."""
    return tuple(hi - lo for lo, hi in box)


def box_size(box: Box) -> int:
    """Number of elements in a box; 0 when it is empty in any dimension."""
    return prod(max(0, hi - lo) for lo, hi in box)


def intersect(a: Box, b: Box) -> Box:
    """The common part of two boxes; empty dimensions give lo >= hi clipped to an empty interval."""
    return tuple((max(x[0], y[0]), max(max(x[0], y[0]), min(x[1], y[1]))) for x, y in zip(a, b, strict=True))


class Cut(Protocol):
    """How one logical tensor is cut over the tensor-parallel axis."""

    def box(self, shape: tuple[int, ...], tp: int, position: int) -> Box:
        """The logical box that `position` of `tp` holds; it may be empty."""
        ...

    def stored_shape(self, shape: tuple[int, ...], tp: int, position: int) -> tuple[int, ...]:
        """The physical shape stored there: the box's shape, or more where zero rows pad it."""
        ...


def _on_dim(shape: tuple[int, ...], dim: int, interval: Interval) -> Box:
    return tuple(interval if i == dim else (0, n) for i, n in enumerate(shape))


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every position holds the whole tensor (norms, value head)."""

    def box(self, shape: tuple[int, ...], tp: int, position: int) -> Box:
        return whole(shape)

    def stored_shape(self, shape: tuple[int, ...], tp: int, position: int) -> tuple[int, ...]:
        return shape


@dataclass(frozen=True, slots=True)
class Even:
    """Cut `dim` into tp parts of whole `multiple`s.

    `balanced` gives the first `n mod tp` positions one multiple more; `chunk` follows `torch.chunk` and
    DTensor: parts of ceil(n/tp), so that late positions may hold nothing (6 over 4 gives 2, 2, 2, 0).
    """

    dim: int
    multiple: int = 1
    rule: Literal["balanced", "chunk"] = "balanced"

    def interval(self, size: int, tp: int, position: int) -> Interval:
        """The interval of `dim` that `position` of `tp` holds."""
        num, rest = divmod(size, self.multiple)
        assert rest == 0, f"a dimension of {size} is not a whole number of {self.multiple}s"
        if self.rule == "chunk":
            width = -(-num // tp)
            lo, hi = min(num, position * width), min(num, (position + 1) * width)
        else:
            base, extra = divmod(num, tp)
            lo = position * base + min(position, extra)
            hi = lo + base + (position < extra)
        return lo * self.multiple, hi * self.multiple

    def box(self, shape: tuple[int, ...], tp: int, position: int) -> Box:
        return _on_dim(shape, self.dim, self.interval(shape[self.dim], tp, position))

    def stored_shape(self, shape: tuple[int, ...], tp: int, position: int) -> tuple[int, ...]:
        return box_shape(self.box(shape, tp, position))


@dataclass(frozen=True, slots=True)
class KvHeads:
    """Cut `dim` by key-value heads, `rows_per_head` rows each; heads are whole.

    With tp <= num_kv_heads the heads are spread evenly (3 over 2 gives 2 and 1). With tp above it, tp must
    be a multiple: keys and values are replicated, position t holding head `t * num_kv_heads // tp`; queries,
    which set `split_group` to the query heads of one kv head, share out that group among its holders.
    """

    dim: int
    num_kv_heads: int
    rows_per_head: int
    split_group: int = 1

    def interval(self, tp: int, position: int) -> Interval:
        """The interval of `dim` that `position` of `tp` holds."""
        if tp <= self.num_kv_heads:
            lo, hi = Even(dim=0).interval(self.num_kv_heads, tp, position)
            return lo * self.rows_per_head, hi * self.rows_per_head
        copies = tp // self.num_kv_heads
        head, copy = divmod(position, copies)
        start = head * self.rows_per_head
        if self.split_group == 1:
            return start, start + self.rows_per_head
        rows = self.rows_per_head // copies
        return start + copy * rows, start + (copy + 1) * rows

    def box(self, shape: tuple[int, ...], tp: int, position: int) -> Box:
        return _on_dim(shape, self.dim, self.interval(tp, position))

    def stored_shape(self, shape: tuple[int, ...], tp: int, position: int) -> tuple[int, ...]:
        return box_shape(self.box(shape, tp, position))


@dataclass(frozen=True, slots=True)
class Vocab:
    """Cut `dim` into tp parts of equal stored rows; zero rows pad it to a multiple of `multiple * tp`."""

    dim: int = 0
    multiple: int = 1

    def stored_rows(self, size: int, tp: int) -> int:
        """Rows that every position stores, pad rows included."""
        return -(-size // (self.multiple * tp)) * self.multiple

    def box(self, shape: tuple[int, ...], tp: int, position: int) -> Box:
        size = shape[self.dim]
        rows = self.stored_rows(size, tp)
        return _on_dim(shape, self.dim, (min(size, position * rows), min(size, (position + 1) * rows)))

    def stored_shape(self, shape: tuple[int, ...], tp: int, position: int) -> tuple[int, ...]:
        rows = self.stored_rows(shape[self.dim], tp)
        return tuple(rows if i == self.dim else n for i, n in enumerate(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One logical tensor: name, shape, cut, and the pipeline place that holds it.

    `place` is a layer index or the first or last stage. `also="last"` marks a tie: the last stage holds the
    same logical tensor a second time when it is not the first stage too. With `experts` dim 0 counts experts,
    which expert parallelism divides; the cut is of another dim.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut
    place: Place
    also: Literal["last"] | None = None
    experts: bool = False

    def box(self, tp: int, position: int, ep: int = 1, expert: int = 0) -> Box:
        """The logical box at a position of the tensor axis and a position of the expert axis."""
        box = self.cut.box(self.shape, tp, position)
        return (Even(dim=0).interval(self.shape[0], ep, expert), *box[1:]) if self.experts else box

    def stored_shape(self, tp: int, position: int, ep: int = 1, expert: int = 0) -> tuple[int, ...]:
        """The physical shape there."""
        shape = self.cut.stored_shape(self.shape, tp, position)
        if not self.experts:
            return shape
        lo, hi = Even(dim=0).interval(self.shape[0], ep, expert)
        return (hi - lo, *shape[1:])


def slice_of(spec: TensorSpec, box: Box, slices: int, index: int) -> Box:
    """Part `index` of `slices` of a box of a tensor, of equal size up to one row; it may be empty.

    The parts follow the dim that tensor parallelism cuts, so that n positions of m slices each lie where
    n * m positions would: trading tp for dp then moves no optimizer state but that of tensors that are cut
    nowhere, which are sliced along their longest dim.
    """
    cut = spec.cut
    shape = spec.shape
    dim = shape.index(max(shape)) if not isinstance(cut, Even | KvHeads | Vocab) else cut.dim
    lo, hi = box[dim]
    start, stop = Even(dim=0).interval(hi - lo, slices, index)
    return tuple((lo + start, lo + stop) if at == dim else side for at, side in enumerate(box))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Several logical tensors stored as one physical tensor, concatenated along dim 0.

    `blocks` stores part after part (q | k | v; gate | up); `per_kv_group` interleaves by kv head
    (q of group 0, k 0, v 0, q of group 1, ...), as Megatron does for qkv.
    """

    name: str
    parts: tuple[str, ...]
    order: Literal["blocks", "per_kv_group"] = "blocks"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Every logical tensor of a model, how they are fused, and the counts that limit its layouts."""

    tensors: tuple[TensorSpec, ...]
    fused: tuple[Fused, ...] = ()
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors by logical name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def num_elements(self) -> int:
        """Number of logical weights; a tied tensor counts once."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of layers, heads, kv heads and experts."""
        return self.num_layers, self.num_heads, self.num_kv_heads, self.num_experts

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.fused, *self.counts))

    def __hash__(self) -> int:
        return self._hash
