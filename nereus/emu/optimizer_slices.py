"""Optimizer state that the units of a model-stage share (ZeRO-1): who holds which slice. Pure.

    theta   tp x pp, whole in every unit                        units
    omega   tp x pp x slices, unit i holds slice i of each      one unit over all their ranks, `sliced(units)`

The two are states of their own with plans of their own, so Extend, Destroy, Split and Merge need no rule
beside the planner's: a slice is a part of the model like any other. Most slices have one holder, so the death
of a unit takes its slices along, and the plan raises NoSource.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from nereus.emu.kinds import Kinds
from nereus.emu.layout import Layout, Rank, sliced
from nereus.emu.partition import Cut, cut_of, partition
from nereus.emu.placement import Floats, holdings, place
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId


def optimizer_stage(model_stage: str) -> str:
    """The name under which a model-stage's optimizer state moves where its units share it."""
    return f"{model_stage}.optimizer"


def optimizer_units(
    model_stage: str, model: str, units: Sequence[Layout], kinds: Kinds, *, shared: bool
) -> tuple[Unit, ...]:
    """The optimizer state of a model-stage as units of a reshard plan: one that all share, or one each."""
    layouts = (sliced(units),) if shared else tuple(units)
    name = optimizer_stage(model_stage)
    return tuple(
        Unit(id=UnitId(name, index), model=model, layout=layout, kinds=kinds)
        for index, layout in enumerate(layouts)
    )


def seat(
    model: ModelSpec,
    old: Sequence[Unit],
    old_omega: Sequence[Unit],
    new: Sequence[Unit],
    topology: Topology,
    *,
    lost: Collection[Rank] = (),
    trained: ModelSpec | None = None,
) -> tuple[Unit, ...]:
    """The new units, which will share their optimizer state, so that most bytes of both states stay.

    Units that stay as they are keep their ranks, and are first put in the order in which their slices overlap
    most with what they hold; the other units' ranks are permuted for the overlap of weights and slices
    together. `new` carries the kinds of theta, `old_omega` those of omega, which is of the tensors of
    `trained`, by default of all.
    """
    stay = [unit.layout in {one.layout for one in old} for unit in new]
    holds = _Holds(trained or model, old_omega, [unit.layout for unit in new], lost)
    layouts = [unit.layout for unit in new]
    if any(stay):
        layouts = [layouts[index] for index in holds.order(layouts)]
    ordered = [unit.with_layout(layout) for unit, layout in zip(new, layouts, strict=True)]
    kept = {rank for unit in old for rank in unit.layout.ranks if unit.layout in layouts}
    width = old_omega[0].bytes_per_element / new[0].bytes_per_element
    part = partition(model, tuple(sorted({cut_of(unit.layout) for unit in (*old, *ordered)})))
    return place(
        part,
        old,
        ordered,
        topology,
        pinned=kept,
        lost=lost,
        also=lambda ranks: width * holds.overlap(layouts, ranks),
    )


class _Holds:
    """What ranks hold of an optimizer state, against what the places of new units need of it."""

    def __init__(
        self, model: ModelSpec, old: Sequence[Unit], layouts: Sequence[Layout], lost: Collection[Rank]
    ) -> None:
        self._num_units = len(layouts)
        cut: Cut = cut_of(sliced(layouts))
        self._part = partition(model, tuple(sorted({cut, *(cut_of(unit.layout) for unit in old)})))
        ranks = {rank for each in (*layouts, *(unit.layout for unit in old)) for rank in each.ranks}
        self._row = {rank: index for index, rank in enumerate(sorted(ranks))}
        self._have = holdings(self._part, old, sorted(ranks))
        self._have[[self._row[rank] for rank in lost if rank in self._row]] = False
        self._need = self._part.held[cut]

    def overlap(self, layouts: Sequence[Layout], ranks: Sequence[Rank]) -> Floats:
        """[places, ranks] elements of the slice at each place, unit after unit, that each rank holds."""
        size = layouts[0].world_size
        rows = [place * self._num_units + unit for unit in range(len(layouts)) for place in range(size)]
        have: Floats = self._have[[self._row[rank] for rank in ranks]].astype(np.float64)
        need: Floats = self._need[rows].astype(np.float64)
        return (need * self._part.num_elements) @ have.T

    def order(self, layouts: Sequence[Layout]) -> list[int]:
        """For each slice the unit that takes it."""
        size, count = layouts[0].world_size, len(layouts)
        by_slice = np.zeros((count, count))
        for number, layout in enumerate(layouts):
            held = self.overlap(layouts, layout.ranks).reshape(count, size, size)
            by_slice[:, number] = np.trace(held, axis1=1, axis2=2)
        rows, columns = linear_sum_assignment(by_slice + 1e-3 * np.eye(count), maximize=True)
        return [int(column) for _, column in sorted(zip(rows.tolist(), columns.tolist(), strict=True))]
