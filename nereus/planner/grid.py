"""A small table over logarithmic axes: multilinear between its knots, constant beyond them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
        """Interpolate at `coordinates` (positive, one array an axis, equal shapes).

        Axis after axis, the last one first: fewer passes over the arrays than a sum over `corners`.
        """
        knots, values, strides = _arrays(self)
        base: Ints | int = 0
        shares: list[Floats] = []
        for axis, stride, coordinate in zip(knots, strides, coordinates, strict=True):
            index, share = _position(axis, coordinate)
            base = base + index * stride
            shares.append(share)
        parts = [values[base + sum(offset)] for offset in product(*((0, stride) for stride in strides))]
        for share in reversed(shares):
            parts = [low + (high - low) * share for low, high in zip(parts[::2], parts[1::2], strict=True)]
        return np.asarray(parts[0])


@lru_cache(maxsize=64)
def _arrays(grid: Grid) -> tuple[tuple[Floats, ...], Floats, tuple[int, ...]]:
    """(knots of every axis, values, how far apart neighbours along each axis lie in them)."""
    sizes = [len(axis) for axis in grid.axes]
    strides = tuple(prod(sizes[at + 1 :]) for at in range(len(sizes)))
    return tuple(np.asarray(axis) for axis in grid.axes), np.asarray(grid.values), strides


def _position(knots: Floats, coordinate: Floats) -> tuple[Ints, Floats]:
    """(lower knot, share of the upper one) of every coordinate."""
    at = np.minimum(np.maximum(np.log2(np.maximum(coordinate, 1e-9)), knots[0]), knots[-1])
    index = np.minimum(np.maximum(knots.searchsorted(at, side="right") - 1, 0), len(knots) - 2)
    low = knots[index]
    return index, (at - low) / (knots[index + 1] - low)


def corners(
    axes: tuple[tuple[float, ...], ...], coordinates: tuple[Floats, ...]
) -> list[tuple[Ints, Floats]]:
    """The 2^d knots around every point: (flat index, weight), each of the coordinates' shape; weights sum
    to 1.
    """
    low: list[Ints] = []
    share: list[Floats] = []
    for axis, coordinate in zip(axes, coordinates, strict=True):
        index, part = _position(np.asarray(axis), coordinate)
        low.append(index)
        share.append(part)
    found = []
    for corner in product((0, 1), repeat=len(axes)):
        flat: Ints = np.zeros_like(low[0])
        weight = np.ones_like(share[0])
        for axis, index, part, up in zip(axes, low, share, corner, strict=True):
            flat = flat * len(axis) + index + up
            weight = weight * (part if up else 1.0 - part)
        found.append((flat, weight))
    return found
