"""The elements of a model, grouped into blocks that every given layout holds or lacks as a whole.

Layers of equal geometry share one computation: the tensors of a *class* (a kind of layer, the first stage,
a tied tensor, the last stage) are cut into *cells*, boxes that each holder of any of the layouts has entirely
or not at all; cells with the same holders form an *atom*; layers that the same pipeline stages hold form a
*segment*. A block is one atom over one segment. A plan for a thousand ranks thus reasons over a few hundred
blocks, whatever the number of layers and tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus.emu.layout import Grid, Layout, Piece, Seat, Shard, shard_at
from nereus.emu.tensor import Box, ModelSpec, TensorSpec, box_size

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Cut(NamedTuple):
    """A layout without its ranks."""

    tp: int
    layers: tuple[int, ...]
    slices: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def grid(self) -> Grid:
        """How the ranks of one stage divide its tensors."""
        return Grid(self.tp, self.slices, self.ep)


def cut_of(layout: Layout) -> Cut:
    """The layout without its ranks."""
    return Cut(layout.tp, layout.layers, layout.slices, layout.ep, layout.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClass:
    """Tensors of equal geometry: `exemplar` is a one-layer model of the first instance.

    `names[i][slot]` is the logical name of tensor `slot` of instance i; `physical[i]` maps the exemplar's
    physical names to those of instance i. `place` is `first`, `layer` or `last`; for layers, `layers[i]` is
    the layer of instance i, else it is empty.
    """

    exemplar: ModelSpec
    place: str
    tied: bool
    names: tuple[tuple[str, ...], ...]
    physical: tuple[dict[str, str], ...]
    layers: tuple[int, ...]

    def chunk(self, instance: int, num_layers: int) -> int:
        """The place of an instance as a number: first 0, layer l 1 + l, last num_layers + 1."""
        if self.place == "layer":
            return 1 + self.layers[instance]
        return 0 if self.place == "first" else num_layers + 1


def exemplar_shard(exemplar: ModelSpec, seat: Seat) -> Shard:
    """What a seat holds of a one-layer model."""
    grid, place = seat
    return shard_at(exemplar, grid.tp, (1,), grid.position(place), grid.slices, grid.ep)


@lru_cache(maxsize=4096)
def pieces_at(exemplar: ModelSpec, seat: Seat) -> dict[str, tuple[Piece, ...]]:
    """A class's pieces at a seat, by logical name."""
    held = exemplar_shard(exemplar, seat)
    out: dict[str, tuple[Piece, ...]] = {}
    for piece in held.pieces:
        out[piece.logical] = (*out.get(piece.logical, ()), piece)
    return out


@lru_cache(maxsize=64)
def classes_of(model: ModelSpec) -> tuple[TensorClass, ...]:
    """The model's tensors by geometry, in order of first appearance: every tensor is in exactly one class."""
    places: dict[tuple[int | str, bool], list[TensorSpec]] = {}
    for spec in model.tensors:
        places.setdefault((spec.place, spec.also == "last"), []).append(spec)
    rule_of = {part: rule for rule in model.fused for part in rule.parts}
    found: dict[object, list[tuple[int | str, bool, list[TensorSpec]]]] = {}
    for (place, tied), specs in places.items():
        slot = {spec.name: index for index, spec in enumerate(specs)}
        rules = dict.fromkeys(rule_of[spec.name] for spec in specs if spec.name in rule_of)
        signature = (
            "layer" if isinstance(place, int) else place,
            tied,
            tuple((spec.shape, spec.cut, spec.experts) for spec in specs),
            tuple((tuple(slot[part] for part in rule.parts), rule.order) for rule in rules),
        )
        found.setdefault(signature, []).append((place, tied, specs))
    return tuple(_make_class(model, members) for members in found.values())


def _make_class(model: ModelSpec, members: list[tuple[int | str, bool, list[TensorSpec]]]) -> TensorClass:
    rule_of = {part: rule for rule in model.fused for part in rule.parts}
    place, tied, first = members[0]
    is_layer = isinstance(place, int)
    specs = tuple(replace(s, place=0) if is_layer else s for s in first)
    exemplar = ModelSpec(
        tensors=specs,
        fused=tuple(dict.fromkeys(rule_of[s.name] for s in first if s.name in rule_of)),
        num_layers=1,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        num_experts=model.num_experts,
    )

    def stored(spec: TensorSpec) -> str:
        return rule_of[spec.name].name if spec.name in rule_of else spec.name

    return TensorClass(
        exemplar=exemplar,
        place="layer" if is_layer else str(place),
        tied=tied,
        names=tuple(tuple(s.name for s in each) for _, _, each in members),
        physical=tuple(
            {stored(a): stored(b) for a, b in zip(first, each, strict=True)} for _, _, each in members
        ),
        layers=tuple(at for at, _, _ in members if isinstance(at, int)),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of tensor `slot` of a class."""

    slot: int
    box: Box


def cell_rows(box: Box) -> int:
    """Number of parts that a box may be cut into along its first dimension of more than one."""
    return next((hi - lo for lo, hi in box if hi - lo > 1), 1)


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """The cells of a class by holders. `held[grid]` is [grid.size, num_atoms]; `num_elements` is for one
    instance.
    """

    cells: tuple[tuple[Cell, ...], ...]
    num_elements: Ints
    held: dict[Grid, Bools]


@lru_cache(maxsize=256)
def _atoms(exemplar: ModelSpec, source: ModelSpec, grids: tuple[Grid, ...]) -> Atoms:
    """Cells lie within one piece of both storages: `exemplar` is the new units', `source` the old units'."""
    cells: list[Cell] = []
    columns: list[Bools] = []
    holders = [Seat(grid, place) for grid in grids for place in range(grid.size)]
    held_pieces = [pieces_at(exemplar, seat) for seat in holders]
    source_pieces = held_pieces if source == exemplar else [pieces_at(source, seat) for seat in holders]
    for slot, spec in enumerate(exemplar.tensors):
        pieces = [(row, piece) for row, by in enumerate(held_pieces) for piece in by.get(spec.name, ())]
        bordered = [*pieces, *((0, piece) for by in source_pieces for piece in by.get(spec.name, ()))]
        edges = [
            np.unique([edge for _, piece in bordered for edge in piece.box[dim]])
            for dim in range(len(spec.shape))
        ]
        grid = np.zeros((len(holders), *(len(edge) - 1 for edge in edges)), dtype=bool)
        for row, piece in pieces:
            inside = tuple(
                slice(*np.searchsorted(edge, interval).tolist())
                for edge, interval in zip(edges, piece.box, strict=True)
            )
            grid[row][inside] = True
        bounds = [list(zip(edge[:-1].tolist(), edge[1:].tolist(), strict=True)) for edge in edges]
        cells += [Cell(slot, box) for box in product(*bounds)]
        columns.append(grid.reshape(len(holders), -1))
    return _group(cells, np.concatenate(columns, axis=1), grids)


def _group(cells: list[Cell], held: Bools, grids: tuple[Grid, ...]) -> Atoms:
    keys = np.packbits(held, axis=0).T
    members: dict[bytes, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key.tobytes(), []).append(index)
    atoms = [tuple(cells[i] for i in indices) for indices in members.values()]
    columns = held[:, [indices[0] for indices in members.values()]]
    starts = np.cumsum([0, *(grid.size for grid in grids)])
    return Atoms(
        cells=tuple(atoms),
        num_elements=np.array([sum(box_size(cell.box) for cell in atom) for atom in atoms], dtype=np.int64),
        held={grid: columns[lo:hi] for grid, lo, hi in zip(grids, starts, starts[1:], strict=False)},
    )


@dataclass(frozen=True, slots=True)
class Block:
    """One atom over one segment: `cells` of every one of `instances` of class `kind`."""

    kind: int
    instances: tuple[int, ...]
    cells: tuple[Cell, ...]

    def items(self) -> Iterator[tuple[int, Cell]]:
        """(instance, cell) in the order that shares of a block are counted in."""
        return product(self.instances, self.cells)

    def snap(self, at: int) -> int:
        """The nearest place at or above element `at` where the block may be cut: between rows of a cell."""
        each = sum(box_size(cell.box) for cell in self.cells)
        instance, inside = divmod(at, each)
        start = 0
        for cell in self.cells:
            size = box_size(cell.box)
            if inside < start + size:
                row = size // cell_rows(cell.box)
                return instance * each + start - (start - inside) // row * row
            start += size
        return at


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Blocks that the layouts of `held` hold as a whole.

    `num_elements[b]` are those of a block. `held[cut]` is [ranks, num_blocks] in layout order.
    `sources` are `classes` as the old units store them, one for one.
    """

    classes: tuple[TensorClass, ...]
    sources: tuple[TensorClass, ...]
    blocks: tuple[Block, ...]
    num_elements: Ints
    held: dict[Cut, Bools]


def _stages(kind: TensorClass, layers: tuple[int, ...]) -> Bools:
    """[instances, pp]: which stages of a split hold each instance."""
    pp = len(layers)
    if kind.place == "layer":
        stage = np.searchsorted(np.cumsum(layers), kind.layers, side="right")
        return np.equal(stage[:, None], np.arange(pp))
    out = np.zeros((1, pp), dtype=bool)
    out[0, 0 if kind.place == "first" else pp - 1] = True
    if kind.tied:
        out[0, pp - 1] = True
    return out


@lru_cache(maxsize=256)
def partition(model: ModelSpec, cuts: tuple[Cut, ...], source: ModelSpec | None = None) -> Partition:
    """The blocks of a model under these cuts, which must be sorted and distinct (for the cache).

    `source` is the same model as the old units store it, None: as the new ones do.
    """
    grids = tuple(sorted({cut.grid for cut in cuts}))
    splits = tuple(sorted({cut.layers for cut in cuts}))
    blocks: list[Block] = []
    sizes: list[Ints] = []
    held: dict[Cut, list[Bools]] = {cut: [] for cut in cuts}
    kinds, sources = classes_of(model), classes_of(source or model)
    assert [kind.names for kind in kinds] == [kind.names for kind in sources], "two models, not two storages"
    for number, kind in enumerate(kinds):
        atoms = _atoms(kind.exemplar, sources[number].exemplar, grids)
        stages = {layers: _stages(kind, layers) for layers in splits}
        segments: dict[bytes, list[int]] = {}
        for instance, key in enumerate(np.concatenate(list(stages.values()), axis=1)):
            segments.setdefault(key.tobytes(), []).append(instance)
        for instances in segments.values():
            blocks += [Block(number, tuple(instances), cells) for cells in atoms.cells]
            sizes.append(atoms.num_elements * len(instances))
            for cut in cuts:
                stage = stages[cut.layers][instances[0]]
                rows = stage[:, None, None, None] & atoms.held[cut.grid][None, None]
                rows = np.repeat(rows, cut.cp, axis=1)  # ranks along cp hold the same
                held[cut].append(rows.reshape(-1, rows.shape[-1]))
    return Partition(
        classes=kinds,
        sources=sources,
        blocks=tuple(blocks),
        num_elements=np.concatenate(sizes),
        held={cut: np.concatenate(rows, axis=1) for cut, rows in held.items()},
    )
