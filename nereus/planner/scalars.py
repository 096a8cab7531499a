"""The few scalars that tie the cost model to one system: what they scale, their features, and a robust fit.

A stage's time is linear in its scalars, so a stage is priced once for each scalar with the others at zero;
these prices are the features of a row. Rows and measured seconds then give the scalars by a Huber fit of
relative errors with a pull towards the prior, which decides what the rows leave open (a job repeats much the
same row).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.planner.calibration import NEUTRAL, Calibration

Floats = NDArray[np.float64]

# Factors are plain numbers, host times count in milliseconds, so that all are of order one.
GENERATION: tuple[str, ...] = ("decode", "prefill", "decode_step_ms")
TRAINING: tuple[str, ...] = ("compute", "network", "layer_ms", "hop_ms")
PRIOR: Mapping[str, float] = {
    "decode": 1.0,
    "prefill": 1.0,
    "decode_step_ms": 1.0,
    "compute": 1.0,
    "network": 1.0,
    "layer_ms": 0.1,
    "hop_ms": 0.1,
}
_HUBER = 0.05  # relative error beyond which a row's pull stops growing
_ROUNDS = 40
_CLASSES = ("gemm", "context_attention", "decode_attention", "elementwise", "optimizer", "scale_up")


def with_scalars(base: Calibration, scalars: Mapping[str, float]) -> Calibration:
    """`base` with scalars applied: factors multiply what `base` holds, host times replace it."""
    changed = base
    for name, value in scalars.items():
        if name == "decode_step_ms":
            changed = replace(changed, decode_step_s=value * 1e-3)
        elif name == "layer_ms":
            changed = replace(changed, layer_s=value * 1e-3)
        elif name == "hop_ms":
            changed = replace(changed, hop_s=value * 1e-3)
        elif name == "network":
            changed = replace(changed, scale_out=changed.scale_out * value)
        elif name == "compute":
            gains = {field: getattr(changed, field) * value for field in _CLASSES}
            changed = replace(changed, **gains)
        elif name == "decode":
            changed = replace(changed, decode=changed.decode * value)
        else:
            assert name == "prefill", f"unknown scalar {name}"
            changed = replace(changed, prefill=changed.prefill * value)
    return changed


def features(
    price: Callable[[Calibration], ArrayLike], names: Sequence[str], base: Calibration = NEUTRAL
) -> Floats:
    """Seconds that `price` gives with one scalar at 1 and the others at 0: [k], or [n, k] for n prices at
    once.
    """
    chosen = ({name: float(name == one) for name in names} for one in names)
    return np.stack([np.asarray(price(with_scalars(base, scalars))) for scalars in chosen], axis=-1)


def fit_scalars(
    rows: ArrayLike,
    measured_s: ArrayLike,
    prior: ArrayLike | None = None,
    prior_weight: float = 0.0,
) -> Floats:
    """Non-negative scalars [k] from feature rows [n, k] and seconds [n].

    Minimises the Huber loss of `row @ x / seconds - 1` plus `prior_weight * |x - prior|^2` by iteratively
    reweighted non-negative least squares; an outlier keeps a bounded pull however far it lies.
    """
    from scipy.optimize import nnls

    seconds = np.asarray(measured_s, dtype=np.float64)
    design = np.asarray(rows, dtype=np.float64) / seconds[:, None]
    count = design.shape[1]
    target = np.ones(len(seconds))
    pull = np.sqrt(prior_weight) * np.eye(count)
    towards = pull @ (np.zeros(count) if prior is None else np.asarray(prior, dtype=np.float64))
    weight = np.ones(len(seconds))
    found = np.zeros(count)
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)[:, None]
        solved, _ = nnls(
            np.concatenate((root * design, pull)), np.concatenate((root[:, 0] * target, towards))
        )
        error = np.abs(design @ solved - target)
        weight = _HUBER / np.maximum(error, _HUBER)
        if np.allclose(solved, found, rtol=1e-6, atol=1e-9):
            break
        found = solved
    return np.asarray(solved)
