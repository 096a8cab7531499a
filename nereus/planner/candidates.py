"""Arrays of candidate sizes (tp, pp, dp): broadcast them, and price equal ones once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


def as_candidates(*sizes: ArrayLike) -> tuple[Floats, ...]:
    """The sizes as float arrays of one common shape [n]."""
    return np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=np.float64)) for size in sizes))


def distinct(*columns: Floats) -> tuple[tuple[Floats, ...], Ints]:
    """Rows of equal-length columns without repetition, and the index that brings them back.

    Columns hold non-negative integers below 2^20 (or any values when there is one distinct value less than
    that); packing them into one key is an order of magnitude faster than sorting rows.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    levels = []
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        levels.append(values)
        key = key * len(values) + index.ravel()
    keys, back = np.unique(key, return_inverse=True)
    found: list[Floats] = []
    for values in reversed(levels):
        keys, index = np.divmod(keys, len(values))
        found.append(values[index])
    return tuple(reversed(found)), back.ravel()
