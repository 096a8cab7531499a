"""How many bytes the shard at each position of a unit occupies, counted a kind of layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import prod

import numpy as np
from numpy.typing import NDArray

from nereus.emu.kinds import Kinds
from nereus.emu.layout import Grid, Seat
from nereus.emu.partition import Cut, classes_of, cut_of, pieces_at
from nereus.emu.tensor import ModelSpec, box_size
from nereus.emu.unit import Unit

# Bytes at every position of a unit, in layout order.
Sizes = Callable[[Unit], tuple[int, ...]]


def shape_of(unit: Unit) -> tuple[object, ...]:
    """What replicas of one model-stage have in common, so that their shards are equally large.

    A plain tuple: it is asked for a thousand units where a `Cut` would cost as much as what it spares.
    """
    cut = unit.layout
    return unit.id.model_stage, cut.tp, cut.layers, cut.slices, cut.ep, cut.cp


def bytes_of(units: Sequence[Unit], sizes: Sizes) -> NDArray[np.int64]:
    """Bytes of the shards of units, one unit after the other, each in layout order.

    Replicas mostly come together: sizes are asked for once for each run of them.
    """
    out: list[NDArray[np.int64]] = []
    at = 0
    for _, alike in groupby([*map(shape_of, units)]):
        count = len([*alike])
        out.append(np.array([sizes(units[at])], dtype=np.int64).repeat(count, axis=0).ravel())
        at += count
    return np.concatenate(out) if out else np.zeros(0, dtype=np.int64)


def sizes_of(models: Mapping[str, ModelSpec]) -> Sizes:
    """Sizes of units of these models. Equal to what `shard` lists, without listing it."""
    known: dict[tuple[str, Cut], tuple[Kinds, tuple[int, ...]]] = {}

    def sizes(unit: Unit) -> tuple[int, ...]:
        cut = cut_of(unit.layout)
        key = (unit.id.model_stage, cut)
        found = known.get(key)
        if found is None or not (found[0] is unit.kinds or found[0] == unit.kinds):
            amounts = _sizes(models[unit.model], cut, unit.bytes_per_element)
            found = known[key] = (unit.kinds, amounts)
        return found[1]

    return sizes


@lru_cache(maxsize=4096)
def _sizes(model: ModelSpec, cut: Cut, width: int) -> tuple[int, ...]:
    grid, layers = cut.grid, cut.layers
    elements = [[0] * grid.size for _ in layers]
    for kind in classes_of(model):
        each = (_elements if grid.slices == 1 else _sliced_elements)(kind.exemplar, grid)
        lo = 0
        for stage, num_layers in enumerate(layers):
            if kind.place == "layer":
                copies = sum(lo <= layer < lo + num_layers for layer in kind.layers)
            else:
                is_home = stage == (0 if kind.place == "first" else len(layers) - 1)
                copies = is_home or (kind.tied and stage == len(layers) - 1)
            lo += num_layers
            for position in range(grid.size):
                elements[stage][position] += copies * each[position]
    return tuple(count * width for row in elements for _ in range(cut.cp) for count in row)


@lru_cache(maxsize=1024)
def _elements(exemplar: ModelSpec, grid: Grid) -> tuple[int, ...]:
    """Stored elements of one instance of a class at every place of a grid without slices."""
    fused = {part for rule in exemplar.fused for part in rule.parts}
    return tuple(
        sum(
            box_size(spec.box(grid.tp, at.tp, grid.ep, at.ep))
            if spec.name in fused
            else prod(spec.stored_shape(grid.tp, at.tp, grid.ep, at.ep))
            for spec in exemplar.tensors
        )
        for at in map(grid.position, range(grid.size))
    )


@lru_cache(maxsize=1024)
def _sliced_elements(exemplar: ModelSpec, grid: Grid) -> tuple[int, ...]:
    """Stored elements of one instance of a class at every place of a grid."""
    return tuple(
        sum(box_size(piece.box) for held in pieces_at(exemplar, Seat(grid, place)).values() for piece in held)
        for place in range(grid.size)
    )
