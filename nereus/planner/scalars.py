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

# Factors are plain numbers, host times count in milliseconds, so that all are of order one. Each kind of
# stage has its own: an engine that decodes slowly may train fast.
GENERATION: tuple[str, ...] = ("decode", "prefill", "decode_step_ms")
SCORING: tuple[str, ...] = ("score_compute", "score_layer_ms")
TRAINING: tuple[str, ...] = ("compute", "network", "layer_ms", "hop_ms")
PRIOR: Mapping[str, float] = {
    "decode": 1.0,
    "prefill": 1.0,
    "decode_step_ms": 1.0,
    "compute": 1.0,
    "network": 1.0,
    "score_compute": 1.0,
    "score_layer_ms": 0.1,
    "layer_ms": 0.1,
    "hop_ms": 0.1,
}
_HUBER = 0.05  # relative error beyond which a row's pull stops growing
_TUKEY = 4.685  # robust deviations beyond which a row is ignored (95 % efficient on clean rows)
_ROUNDS = 12
_FLOOR_S = 1e-9  # a prediction is never shorter
_FACTORS = {
    "decode": "decode",
    "prefill": "prefill",
    "compute": "train_compute",
    "network": "train_network",
    "score_compute": "score_compute",
}
_MILLISECONDS = {
    "decode_step_ms": "decode_step_s",
    "layer_ms": "layer_s",
    "score_layer_ms": "score_layer_s",
    "hop_ms": "hop_s",
}


def with_scalars(base: Calibration, scalars: Mapping[str, float]) -> Calibration:
    """`base` with scalars applied: factors multiply what `base` holds, host times replace it."""
    changes = {}
    for name, value in scalars.items():
        if (place := _MILLISECONDS.get(name)) is not None:
            changes[place] = value * 1e-3
        else:
            changes[_FACTORS[name]] = getattr(base, _FACTORS[name]) * value
    return replace(base, **changes)


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

    Iteratively reweighted non-negative least squares on errors relative to the prediction so far (relative to
    the measurement, a row that is far too fast would count most). Huber's weights from a robust start; then
    Tukey's, which take no notice of a row 4.7 robust deviations away. `prior_weight * |x - prior|^2` is
    added.
    """
    from scipy.optimize import nnls

    seconds = np.asarray(measured_s, dtype=np.float64)
    design = np.asarray(rows, dtype=np.float64)
    start = np.ones(design.shape[1]) if prior is None else np.asarray(prior, dtype=np.float64)
    pull = np.sqrt(prior_weight) * np.eye(len(start))
    guess = np.maximum(design @ start, _FLOOR_S)
    guess = guess * float(np.median(seconds / guess))
    found = start
    for step in range(2 * _ROUNDS):
        error = np.abs(seconds / guess - 1)
        if step < _ROUNDS:
            weight = _HUBER / np.maximum(error, _HUBER)
        else:
            limit = _TUKEY * max(1.4826 * float(np.median(error)), _HUBER / 5)
            weight = (1 - np.minimum(error / limit, 1.0) ** 2) ** 2
        root = np.sqrt(weight) / guess
        found, _ = nnls(
            np.concatenate((root[:, None] * design, pull)),
            np.concatenate((root * seconds, pull @ start)),
        )
        guess = np.maximum(design @ found, _FLOOR_S)
    return np.asarray(found)


def fit_gain(predict: Callable[[float], Floats], measured_s: ArrayLike) -> tuple[float, float]:
    """(factor, weight of the tables' residuals) of a machine from a few dozen measured kernels or layers.

    `predict` prices the same calls with a given `Calibration.correction`. Where the tables' library runs,
    their residuals fit and the weight is 1; elsewhere they do not and it is 0. The smaller median deviation
    after a median factor tells.
    """
    seconds = np.asarray(measured_s, dtype=np.float64)
    best = (np.inf, 1.0, 1.0)
    for weight in (1.0, 0.0):
        ratio = np.log(seconds / predict(weight))
        middle = float(np.median(ratio))
        best = min(best, (float(np.median(np.abs(ratio - middle))), float(np.exp(middle)), weight))
    return best[1], best[2]
