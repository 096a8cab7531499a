"""A small table over logarithmic axes: multilinear between its knots, constant beyond them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values at the knots of `axes` (powers of two, ascending), flattened in C order."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        size = prod(len(axis) for axis in self.axes)
        assert len(self.values) == size, f"a grid of {size} knots has {len(self.values)} values"

    def __call__(self, *coordinates: Floats) -> Floats:
        """Interpolate at `coordinates` (positive, one array an axis, equal shapes)."""
        values = np.asarray(self.values)
        return np.asarray(sum(values[at] * share for at, share in corners(self.axes, coordinates)))


def corners(
    axes: tuple[tuple[float, ...], ...], coordinates: tuple[Floats, ...]
) -> list[tuple[Ints, Floats]]:
    """The 2^d knots around every point: (flat index, weight), each of the coordinates' shape; weights sum
    to 1.
    """
    low: list[Ints] = []
    share: list[Floats] = []
    for axis, coordinate in zip(axes, coordinates, strict=True):
        knots = np.asarray(axis)
        at = np.clip(np.log2(np.maximum(coordinate, 1e-9)), knots[0], knots[-1])
        index = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
        low.append(index)
        share.append((at - knots[index]) / (knots[index + 1] - knots[index]))
    found = []
    for corner in product((0, 1), repeat=len(axes)):
        flat: Ints = np.zeros_like(low[0])
        weight = np.ones_like(share[0])
        for axis, index, part, up in zip(axes, low, share, corner, strict=True):
            flat = flat * len(axis) + index + up
            weight = weight * (part if up else 1.0 - part)
        found.append((flat, weight))
    return found
