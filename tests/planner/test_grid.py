"""Grids interpolate between their knots and never beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.planner.grid import Grid, corners

AXES = ((0.0, 2.0, 5.0), (1.0, 3.0))


@given(st.floats(-3, 8), st.floats(-2, 6))
def test_weights_of_the_corners_sum_to_one(first: float, second: float) -> None:
    found = corners(AXES, (np.array([2.0**first]), np.array([2.0**second])))
    assert sum(float(weight[0]) for _, weight in found) == pytest.approx(1.0)
    assert all(weight[0] >= -1e-12 for _, weight in found)
    assert all(0 <= index[0] < 6 for index, _ in found)


def test_linear_functions_are_reproduced_between_knots() -> None:
    values = tuple(3 * x - 2 * y for x in AXES[0] for y in AXES[1])
    grid = Grid(axes=AXES, values=values)
    x, y = np.array([0.5, 3.7, 4.9]), np.array([1.1, 2.0, 2.9])
    assert grid(2**x, 2**y) == pytest.approx(3 * x - 2 * y)


def test_values_are_constant_beyond_the_ends() -> None:
    grid = Grid(axes=AXES, values=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0))
    assert grid(np.array([2.0**9]), np.array([2.0**9]))[0] == 5.0
    assert grid(np.array([1e-3]), np.array([1e-3]))[0] == 0.0


def test_wrong_number_of_values_is_caught() -> None:
    with pytest.raises(AssertionError, match="6 knots"):
        Grid(axes=AXES, values=(1.0,))
