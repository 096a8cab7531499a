"""Online calibration: measured kernel, collective and stage times in, a `Calibration` out; robust to
outliers.

A `Calibrator` is a value; `observed` and `with_stage` return the next one. Class gains are running medians of
log(measured / predicted) whose steps are bounded, so a stalled GPU or a cold cache cannot throw them; stage
scalars are refitted from a window of recent stages, pulled towards what an earlier job left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.errors import ConfigError, explain
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.scalars import GENERATION, PRIOR, SCORING, TRAINING, fit_gain, fit_scalars, with_scalars

Floats = NDArray[np.float64]

CLASSES: tuple[str, ...] = (
    "gemm",
    "context_attention",
    "decode_attention",
    "elementwise",
    "optimizer",
    "scale_up",
    "scale_out",
    "host",
)
# Which class a term of a stage's cost belongs to, where it belongs to one.
CLASS_OF_TERM: Mapping[str, str] = {
    "gemm": "gemm",
    "head": "gemm",
    "attention": "context_attention",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "tensor_parallel": "scale_up",
    "pipeline": "scale_out",
    "data_parallel": "scale_out",
}
MAX_GAIN = 16.0  # no machine is this far from its table; beyond it something else is wrong
_WINDOW = 64  # stages a fit looks back
_MEMORY = 32.0  # effective observations after which old ones fade
_STEP = 0.35  # largest move of a log gain in one update once it has settled
_PRIOR_WEIGHT = 0.02  # pull of a fresh prior, in units of one row's squared relative error


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Running estimate of one class: `log_gain` of measured over predicted, `weight` in effective
    observations.
    """

    log_gain: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        """The factor itself, within [1/16, 16]."""
        return math.exp(self.log_gain)

    def observed(self, predicted_s: Sequence[float], measured_s: Sequence[float]) -> Gain:
        """The estimate after a batch of pairs; pairs that are not positive and finite are left out.

        The batch speaks by its median. The step towards it shrinks with the weight so far and, from the
        second batch on, is bounded, so fewer than half outliers in a batch, or one wild batch, move it
        little.
        """
        ratios = [
            math.log(measured / predicted)
            for predicted, measured in zip(predicted_s, measured_s, strict=True)
            if 0 < predicted < math.inf and 0 < measured < math.inf
        ]
        if not ratios:
            return self
        limit = math.log(MAX_GAIN)
        middle = min(max(float(np.median(ratios)), -limit), limit)
        arrived = float(len(ratios))
        step = (middle - self.log_gain) * arrived / (self.weight + arrived)
        if self.weight > 0:
            step = min(max(step, -_STEP), _STEP)
        return Gain(log_gain=self.log_gain + step, weight=min(self.weight + arrived, _MEMORY))

    def faded(self, share: float) -> Gain:
        """The same estimate with less weight: a prior for a later job."""
        return replace(self, weight=self.weight * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """The scalars of one kind of stage, the rows they come from, and the prior that they are pulled to."""

    names: tuple[str, ...]
    prior: tuple[float, ...]
    prior_weight: float = _PRIOR_WEIGHT
    rows: tuple[tuple[float, ...], ...] = ()
    seconds: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def fresh(cls, names: tuple[str, ...]) -> StageFit:
        """No rows yet, the general prior."""
        prior = tuple(PRIOR[name] for name in names)
        return cls(names=names, prior=prior, values=prior)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was learned, neither here nor by an earlier job."""
        return not self.rows and self.values == StageFit.fresh(self.names).values

    @property
    def scalars(self) -> Mapping[str, float]:
        """The current values by name."""
        return dict(zip(self.names, self.values, strict=True))

    def observed(self, row: ArrayLike, measured_s: float) -> StageFit:
        """The fit after one more stage; a row that is not finite and positive is left out."""
        values_s = np.asarray(row, dtype=np.float64)
        usable = 0 < measured_s < math.inf and np.isfinite(values_s).all() and (values_s >= 0).all()
        if not usable or not values_s.any():
            return self
        rows = (*self.rows, tuple(values_s.tolist()))[-_WINDOW:]
        seconds = (*self.seconds, float(measured_s))[-_WINDOW:]
        values = fit_scalars(rows, seconds, self.prior, self.prior_weight)
        return replace(self, rows=rows, seconds=seconds, values=tuple(float(value) for value in values))

    def faded(self, share: float) -> StageFit:
        """The values as a prior for a later job, with `share` of a full prior's pull for every row seen."""
        if self.is_fresh:
            return self
        seen = min(len(self.rows), 8) / 8
        weight = _PRIOR_WEIGHT * max(share * (1 + 4 * seen), 0.1)
        return StageFit(names=self.names, prior=self.values, prior_weight=weight, values=self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrator:
    """Everything learned about one (system, engine, model)."""

    gains: Mapping[str, Gain] = field(default_factory=dict)
    correction: float = 1.0
    generation: StageFit = field(default_factory=lambda: StageFit.fresh(GENERATION))
    scoring: StageFit = field(default_factory=lambda: StageFit.fresh(SCORING))
    training: StageFit = field(default_factory=lambda: StageFit.fresh(TRAINING))

    def observed(
        self, operation_class: str, predicted_s: Sequence[float], measured_s: Sequence[float]
    ) -> Calibrator:
        """After measured times of one operation or link class, against neutral predictions of the same calls.

        Raises ConfigError for an unknown class.
        """
        if operation_class not in CLASSES:
            raise ConfigError(
                explain("cannot calibrate", values=operation_class, rule=f"classes are {', '.join(CLASSES)}")
            )
        gain = self.gains.get(operation_class, Gain()).observed(predicted_s, measured_s)
        return replace(self, gains={**self.gains, operation_class: gain})

    def with_terms(self, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> Calibrator:
        """After one scoring or training stage whose engine timed its terms; `predicted_s` are the neutral
        ones.

        Terms that only one side has, or that belong to no class (bubble, host), are left out.
        """
        after = self
        for term, operation_class in CLASS_OF_TERM.items():
            if term in predicted_s and term in measured_s:
                after = after.observed(operation_class, [predicted_s[term]], [measured_s[term]])
        return after

    def with_products(self, predict: Callable[[float], Floats], measured_s: ArrayLike) -> Calibrator:
        """After a few dozen timed products or layers: the weight of the tables' residuals, and the gain of
        `gemm`.

        `predict` as for `scalars.fit_gain`. Meant for a probe at the start of a job.
        """
        gain, weight = fit_gain(predict, measured_s)
        after = self.observed(
            "gemm", [1.0] * len(np.atleast_1d(measured_s)), [gain] * len(np.atleast_1d(measured_s))
        )
        return replace(after, correction=weight)

    def with_generation(self, row: ArrayLike, measured_s: float) -> Calibrator:
        """After one generation stage; `row` are its `scalars.features` for GENERATION over `base`."""
        return replace(self, generation=self.generation.observed(row, measured_s))

    def with_scoring(self, row: ArrayLike, measured_s: float) -> Calibrator:
        """After one scoring stage; `row` are its `scalars.features` for SCORING over `base`."""
        return replace(self, scoring=self.scoring.observed(row, measured_s))

    def with_training(self, row: ArrayLike, measured_s: float) -> Calibrator:
        """After one training stage; `row` are its `scalars.features` for TRAINING over `base`."""
        return replace(self, training=self.training.observed(row, measured_s))

    @property
    def base(self) -> Calibration:
        """Class gains only: what stage features are priced with."""
        gains = {name: gain.value for name, gain in self.gains.items()}
        return replace(NEUTRAL, correction=self.correction, **gains)

    @property
    def calibration(self) -> Calibration:
        """All that was learned, for the cost model."""
        learned = with_scalars(with_scalars(self.base, self.generation.scalars), self.training.scalars)
        if self.scoring.is_fresh:  # a forward pass of the same engine, as far as anything is known
            return learned.scores_while_training
        return with_scalars(learned, self.scoring.scalars)

    def faded(self, share: float) -> Calibrator:
        """A prior for a later job: same values, less weight."""
        return Calibrator(
            gains={name: gain.faded(share) for name, gain in self.gains.items()},
            correction=self.correction,
            generation=self.generation.faded(share),
            scoring=self.scoring.faded(share),
            training=self.training.faded(share),
        )
