"""Layouts: which rank of a unit holds which box of which logical tensor, and where it stores it.

`Layout` is (tp, pp, ep, cp) with explicit ranks in layout order and an explicit layer split. `shard` lists,
for one position, the physical tensors and their pieces. A piece says: this box of the physical tensor is that
box of the logical tensor. Fusing, replication of kv heads, vocabulary padding, ties and uneven splits exist
only here, as the pieces a position lists; planner, executor, checkpoint and loader see pieces alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Literal, NamedTuple

from nereus.emu.tensor import Box, Fused, ModelSpec, TensorSpec, box_shape, box_size, slice_of, whole
from nereus.errors import InvalidLayout, explain

Rank = int
Axis = Literal["pp", "cp", "ep", "tp"]
AXES: tuple[Axis, ...] = ("pp", "cp", "ep", "tp")  # the order of the mesh: neighbours along tp are neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Coordinates of one shard inside a unit; `slice` is above 0 only where ranks share a position."""

    pp: int
    tp: int
    slice: int = 0
    ep: int = 0
    cp: int = 0


class Grid(NamedTuple):
    """How the ranks of one pipeline stage divide its tensors; ranks along cp hold the same."""

    tp: int
    slices: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """Number of places."""
        return self.ep * self.tp * self.slices

    def position(self, place: int) -> Position:
        """The coordinates of a place, (ep index * tp + tp index) * slices + slice."""
        at, part = divmod(place, self.slices)
        return Position(pp=0, tp=at % self.tp, slice=part, ep=at // self.tp)


class Seat(NamedTuple):
    """A place on a grid."""

    grid: Grid
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """(tp, pp, ep, cp) with explicit ranks and layers.

    `ranks[((pp_index * cp + cp_index) * ep + ep_index) * tp + tp_index]` is the rank at that position, never
    sorted. `layers[i]` is the number of layers of pipeline stage i. `ep` divides the experts of a mixture,
    `cp` the tokens of every sequence: ranks along ep hold the other tensors, and ranks along cp all tensors,
    alike. With `slices` above 1 that many ranks, one after the other in `ranks`, divide each position among
    them: the layout of an optimizer state that the units of a model-stage share (ZeRO-1).
    """

    tp: int
    pp: int
    ranks: tuple[Rank, ...]
    layers: tuple[int, ...]
    slices: int = 1
    ep: int = 1
    cp: int = 1

    @classmethod
    def make(
        cls,
        model: ModelSpec,
        *,
        tp: int,
        pp: int,
        ranks: tuple[Rank, ...],
        layers: tuple[int, ...] | None = None,
        ep: int = 1,
        cp: int = 1,
    ) -> Layout:
        """Build and check a layout; without `layers` the first stages take the remainder.

        Raises InvalidLayout when the ranks, the heads, the experts or the layers do not fit.
        """
        if layers is None:
            base, extra = divmod(model.num_layers, max(1, pp))
            layers = tuple(base + (stage < extra) for stage in range(pp))
        layout = cls(tp=tp, pp=pp, ranks=tuple(ranks), layers=tuple(layers), ep=ep, cp=cp)
        layout.check(model)
        return layout

    def check(self, model: ModelSpec) -> None:
        """Raise InvalidLayout unless the model can be cut this way."""
        values = f"{self.sizes_text} ranks={list(self.ranks)} layers={list(self.layers)}"
        if problem := self._problem(model):
            rule, remedy = problem
            raise InvalidLayout(explain("cannot lay out the model", values=values, rule=rule, remedy=remedy))

    def _problem(self, model: ModelSpec) -> tuple[str, str] | None:
        if min(self.tp, self.pp, self.ep, self.cp) < 1:
            return "tp, pp, ep and cp must be at least 1", "give positive sizes"
        if len(self.ranks) != self.world_size or len(set(self.ranks)) != len(self.ranks):
            return (
                f"a unit needs tp*pp*ep*cp = {self.world_size} distinct ranks",
                "give one rank for every position",
            )
        if len(self.layers) != self.pp or sum(self.layers) != model.num_layers or min(self.layers) < 1:
            return (
                f"the {model.num_layers} layers must be split over {self.pp} stages, at least one each",
                "lower pp or give a split that adds up",
            )
        if self.ep > 1 and (not model.num_experts or model.num_experts % self.ep):
            has = f"{model.num_experts} experts" if model.num_experts else "no experts"
            return f"ep divides the experts of a model, and this one has {has}", "choose ep=1, or such an ep"
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
        return self.tp * self.pp * self.ep * self.cp * self.slices

    @property
    def grid(self) -> Grid:
        """How the ranks of one pipeline stage divide its tensors."""
        return Grid(self.tp, self.slices, self.ep)

    @property
    def sizes_text(self) -> str:
        """E.g. `tp=2 pp=1`; ep and cp where they are above 1."""
        return " ".join(f"{axis}={size}" for axis, size in self._sizes())

    @property
    def text(self) -> str:
        """E.g. `tp2 pp1 ep4`; ep and cp where they are above 1."""
        return " ".join(f"{axis}{size}" for axis, size in self._sizes())

    def _sizes(self) -> list[tuple[str, int]]:
        more = [(axis, size) for axis, size in (("ep", self.ep), ("cp", self.cp)) if size != 1]
        return [("tp", self.tp), ("pp", self.pp), *more]

    @property
    def split(self) -> tuple[tuple[int, int], ...]:
        """The layer interval [lo, hi) of every pipeline stage."""
        ends = tuple(accumulate(self.layers))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def position(self, rank: Rank) -> Position:
        """Where a rank sits. Raises InvalidLayout for a stranger."""
        try:
            at, part = divmod(self.ranks.index(rank), self.slices)
        except ValueError:
            raise InvalidLayout(
                explain(f"rank {rank} is not in the layout", values=f"ranks={list(self.ranks)}")
            ) from None
        at, tp = divmod(at, self.tp)
        at, ep = divmod(at, self.ep)
        pp, cp = divmod(at, self.cp)
        return Position(pp=pp, tp=tp, slice=part, ep=ep, cp=cp)

    def seat(self, rank: Rank) -> Seat:
        """What a rank holds of its stage. Raises InvalidLayout for a stranger."""
        at = self.position(rank)
        return Seat(self.grid, (at.ep * self.tp + at.tp) * self.slices + at.slice)

    def rank_at(self, pp: int, tp: int, ep: int = 0, cp: int = 0) -> Rank:
        """The rank at a position."""
        return self.ranks[((pp * self.cp + cp) * self.ep + ep) * self.tp + tp]

    def groups(self, *axes: Axis) -> list[tuple[Rank, ...]]:
        """All groups of ranks that differ along these axes alone, each in layout order; in layout order of
        their first ranks.
        """
        assert self.slices == 1, "ranks that share a position form no groups"
        sizes: dict[Axis, int] = {"pp": self.pp, "cp": self.cp, "ep": self.ep, "tp": self.tp}
        found: dict[tuple[int, ...], list[Rank]] = {}
        for rank, at in zip(self.ranks, product(*(range(sizes[axis]) for axis in AXES)), strict=True):
            others = tuple(i for axis, i in zip(AXES, at, strict=True) if axis not in axes)
            found.setdefault(others, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def tp_group(self, pp: int) -> tuple[Rank, ...]:
        """The ranks of one pipeline stage in tensor-parallel order, the first of them along ep and cp."""
        return tuple(self.rank_at(pp, tp) for tp in range(self.tp))

    def pp_group(self, tp: int) -> tuple[Rank, ...]:
        """The ranks of one tensor-parallel position in pipeline order, the first of them along ep and cp."""
        return tuple(self.rank_at(pp, tp) for pp in range(self.pp))

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
    model: ModelSpec, tp: int, layers: tuple[int, ...], position: Position, slices: int = 1, ep: int = 1
) -> Shard:
    """The shard at one position of a (tp, len(layers), ep) layout. Independent of which rank sits there."""
    if slices > 1:
        whole_shard = shard_at(model, tp, layers, replace(position, slice=0), ep=ep)
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
            tensors.append(_plain(spec, tp, ep, position))
        elif rule.name not in seen:
            seen.add(rule.name)
            parts = [model.by_name[name] for name in rule.parts]
            tensors.append(_fused(rule, parts, tp, position.tp, model.num_kv_heads))
    return Shard(position=position, tensors=tuple(tensors))


def shard(model: ModelSpec, layout: Layout, rank: Rank) -> Shard:
    """The shard that `rank` stores under `layout`."""
    return shard_at(model, layout.tp, layout.layers, layout.position(rank), layout.slices, layout.ep)


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


def _plain(spec: TensorSpec, tp: int, ep: int, at: Position) -> PhysicalTensor:
    box = spec.box(tp, at.tp, ep, at.ep)
    stored = whole(box_shape(box))
    pieces = (Piece(physical=spec.name, stored=stored, logical=spec.name, box=box),) if box_size(box) else ()
    return PhysicalTensor(name=spec.name, shape=spec.stored_shape(tp, at.tp, ep, at.ep), pieces=pieces)


def _fused(rule: Fused, parts: list[TensorSpec], tp: int, position: int, num_kv_heads: int) -> PhysicalTensor:
    assert not any(part.experts for part in parts), "tensors of experts are stored as they are"
    boxes = [part.box(tp, position) for part in parts]
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
