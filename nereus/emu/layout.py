"""Layouts: which rank of a unit holds which box of which logical tensor, and where it stores it.

`Layout` is (tp, pp) with explicit ranks in layout order and an explicit layer split. `shard` lists, for
one position, the physical tensors and their pieces. A piece says: this box of the physical tensor is that
box of the logical tensor. Fusing, replication of kv heads, vocabulary padding, ties and uneven splits exist
only here, as the pieces a position lists; planner, executor, checkpoint and loader see pieces alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from nereus.emu.tensor import Box, Fused, ModelSpec, TensorSpec, box_shape, box_size, slice_of, whole
from nereus.errors import InvalidLayout, explain

Rank = int
Seat = tuple[int, int, int]  # (tp, slices, place on the tensor axis: tp index * slices + slice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Coordinates of one shard inside a unit; `slice` is above 0 only where ranks share a position."""

    pp: int
    tp: int
    slice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """(tp, pp) with explicit ranks and layers.

    `ranks[pp_index * tp + tp_index]` is the rank at that position, never sorted. `layers[i]` is the number of
    layers of pipeline stage i. With `slices` above 1 that many ranks, one after the other in `ranks`, divide
    each position among them: the layout of an optimizer state that the units of a model-stage share (ZeRO-1).
    """

    tp: int
    pp: int
    ranks: tuple[Rank, ...]
    layers: tuple[int, ...]
    slices: int = 1

    @classmethod
    def make(
        cls,
        model: ModelSpec,
        *,
        tp: int,
        pp: int,
        ranks: tuple[Rank, ...],
        layers: tuple[int, ...] | None = None,
    ) -> Layout:
        """Build and check a layout; without `layers` the first stages take the remainder.

        Raises InvalidLayout when the ranks, the heads or the layers do not fit.
        """
        if layers is None:
            base, extra = divmod(model.num_layers, max(1, pp))
            layers = tuple(base + (stage < extra) for stage in range(pp))
        layout = cls(tp=tp, pp=pp, ranks=tuple(ranks), layers=tuple(layers))
        layout.check(model)
        return layout

    def check(self, model: ModelSpec) -> None:
        """Raise InvalidLayout unless the model can be cut this way."""
        values = f"tp={self.tp} pp={self.pp} ranks={list(self.ranks)} layers={list(self.layers)}"
        if problem := self._problem(model):
            rule, remedy = problem
            raise InvalidLayout(explain("cannot lay out the model", values=values, rule=rule, remedy=remedy))

    def _problem(self, model: ModelSpec) -> tuple[str, str] | None:
        if self.tp < 1 or self.pp < 1:
            return "tp and pp must be at least 1", "give positive sizes"
        if len(self.ranks) != self.world_size or len(set(self.ranks)) != len(self.ranks):
            return (
                f"a unit needs tp*pp = {self.tp * self.pp} distinct ranks",
                "give one rank for every position",
            )
        if len(self.layers) != self.pp or sum(self.layers) != model.num_layers or min(self.layers) < 1:
            return (
                f"the {model.num_layers} layers must be split over {self.pp} stages, at least one each",
                "lower pp or give a split that adds up",
            )
        heads, kv = model.num_heads, model.num_kv_heads
        if self.tp > kv and (self.tp % kv or heads % self.tp):
            return (
                f"with tp above the {kv} kv heads, tp must be a multiple of {kv} and divide {heads} heads",
                f"choose tp <= {kv}, or a multiple of {kv} that divides {heads}",
            )
        return None

    @property
    def world_size(self) -> int:
        """Number of ranks in the unit."""
        return self.tp * self.pp * self.slices

    @property
    def split(self) -> tuple[tuple[int, int], ...]:
        """The layer interval [lo, hi) of every pipeline stage."""
        ends = tuple(accumulate(self.layers))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def position(self, rank: Rank) -> Position:
        """Where a rank sits. Raises InvalidLayout for a stranger."""
        try:
            place, part = divmod(self.ranks.index(rank), self.slices)
        except ValueError:
            raise InvalidLayout(
                explain(f"rank {rank} is not in the layout", values=f"ranks={list(self.ranks)}")
            ) from None
        return Position(pp=place // self.tp, tp=place % self.tp, slice=part)

    def seat(self, rank: Rank) -> Seat:
        """Where a rank sits on the tensor axis. Raises InvalidLayout for a stranger."""
        at = self.position(rank)
        return self.tp, self.slices, at.tp * self.slices + at.slice

    def rank_at(self, pp: int, tp: int) -> Rank:
        """The rank at a position."""
        return self.ranks[pp * self.tp + tp]

    def tp_group(self, pp: int) -> tuple[Rank, ...]:
        """The ranks of one pipeline stage in tensor-parallel order."""
        return self.ranks[pp * self.tp : (pp + 1) * self.tp]

    def pp_group(self, tp: int) -> tuple[Rank, ...]:
        """The ranks of one tensor-parallel position in pipeline order."""
        return self.ranks[tp :: self.tp]

    def with_ranks(self, ranks: tuple[Rank, ...]) -> Layout:
        """The same cut on other ranks."""
        return replace(self, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Box `stored` of the physical tensor `physical` is box `box` of the logical tensor `logical`."""

    physical: str
    stored: Box
    logical: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalTensor:
    """One stored tensor of a shard. Rows that no piece covers are padding and hold zeros."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Everything one position of a layout stores, in storage order."""

    position: Position
    tensors: tuple[PhysicalTensor, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in storage order."""
        return tuple(piece for tensor in self.tensors for piece in tensor.pieces)


def sliced(units: Sequence[Layout]) -> Layout:
    """One layout over the ranks of all units, which are cut alike: unit i holds slice i of every position."""
    first = units[0]
    ranks = tuple(unit.ranks[place] for place in range(first.world_size) for unit in units)
    return replace(first, ranks=ranks, slices=len(units))


@lru_cache(maxsize=4096)
def shard_at(
    model: ModelSpec, tp: int, layers: tuple[int, ...], position: Position, slices: int = 1
) -> Shard:
    """The shard at one position of a (tp, len(layers)) layout. Independent of which rank sits there."""
    if slices > 1:
        whole_shard = shard_at(model, tp, layers, replace(position, slice=0))
        tensors_of = tuple(_slice(model, tensor, slices, position.slice) for tensor in whole_shard.tensors)
        return Shard(position=position, tensors=tensors_of)
    pp = len(layers)
    lo = sum(layers[: position.pp])
    mine = range(lo, lo + layers[position.pp])
    first, last = position.pp == 0, position.pp == pp - 1
    fused_of = {part: rule for rule in model.fused for part in rule.parts}
    tensors: list[PhysicalTensor] = []
    seen: set[str] = set()
    for spec in model.tensors:
        here = (
            spec.place in mine if isinstance(spec.place, int) else (first if spec.place == "first" else last)
        )
        tied_here = spec.also == "last" and last and not here
        if not (here or tied_here):
            continue
        rule = fused_of.get(spec.name)
        if rule is None:
            tensors.append(_plain(spec, tp, position.tp))
        elif rule.name not in seen:
            seen.add(rule.name)
            parts = [model.by_name[name] for name in rule.parts]
            tensors.append(_fused(rule, parts, tp, position.tp, model.num_kv_heads))
    return Shard(position=position, tensors=tuple(tensors))


def shard(model: ModelSpec, layout: Layout, rank: Rank) -> Shard:
    """The shard that `rank` stores under `layout`."""
    return shard_at(model, layout.tp, layout.layers, layout.position(rank), layout.slices)


def _slice(model: ModelSpec, tensor: PhysicalTensor, slices: int, index: int) -> PhysicalTensor:
    """Part `index` of every piece, one after the other along dim 0; pad rows are in no slice."""
    pieces: list[Piece] = []
    at = 0
    for piece in tensor.pieces:
        box = slice_of(model.by_name[piece.logical], piece.box, slices, index)
        if not box_size(box):
            continue
        shape = box_shape(box)
        stored = ((at, at + shape[0]), *whole(shape[1:]))
        pieces.append(Piece(physical=tensor.name, stored=stored, logical=piece.logical, box=box))
        at += shape[0]
    rest = box_shape(pieces[0].stored)[1:] if pieces else tensor.shape[1:]
    return PhysicalTensor(name=tensor.name, shape=(at, *rest), pieces=tuple(pieces))


def _plain(spec: TensorSpec, tp: int, position: int) -> PhysicalTensor:
    box = spec.cut.box(spec.shape, tp, position)
    stored = whole(box_shape(box))
    pieces = (Piece(physical=spec.name, stored=stored, logical=spec.name, box=box),) if box_size(box) else ()
    return PhysicalTensor(
        name=spec.name, shape=spec.cut.stored_shape(spec.shape, tp, position), pieces=pieces
    )


def _fused(rule: Fused, parts: list[TensorSpec], tp: int, position: int, num_kv_heads: int) -> PhysicalTensor:
    boxes = [part.cut.box(part.shape, tp, position) for part in parts]
    rows = [hi - lo for (lo, hi), *_ in boxes]
    rest = box_shape(boxes[0])[1:]
    blocks = 1 if rule.order == "blocks" else _groups(tp, num_kv_heads, position)
    pieces: list[Piece] = []
    at = 0
    for block in range(blocks):
        for part, box, num_rows in zip(parts, boxes, rows, strict=True):
            height = num_rows // blocks
            lo = box[0][0] + block * height
            if height and box_size(box):
                stored = ((at, at + height), *whole(rest))
                pieces.append(
                    Piece(
                        physical=rule.name,
                        stored=stored,
                        logical=part.name,
                        box=((lo, lo + height), *box[1:]),
                    )
                )
            at += height
    return PhysicalTensor(name=rule.name, shape=(at, *rest), pieces=tuple(pieces))


def _groups(tp: int, num_kv_heads: int, position: int) -> int:
    """Number of kv groups that a position holds, for the per-group order."""
    return 1 if tp > num_kv_heads else num_kv_heads // tp + (position < num_kv_heads % tp)
