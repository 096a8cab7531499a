"""What stage times alone teach: one factor a stage, measured over predicted, as a calibration. Robust to
outliers.

A live engine that reports no kernel times still says how long its stages took. The factor of a stage is the
median of its last ratios to the *neutral* prediction, so one cold step or one stall moves it little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.workload import Stage

WINDOW = 7
BOUND = 1e4  # a machine that is further from the tables is another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGains:
    """The last ratios of measured to neutrally predicted seconds, by stage."""

    ratios: Mapping[Stage, tuple[float, ...]] = field(default_factory=dict)

    def observed(self, ratios: Mapping[Stage, float], used: Calibration) -> StageGains:
        """After one more step. `ratios` are measured over predicted; the prediction was made with `used`."""
        factors = {
            Stage.GENERATION: used.decode,
            Stage.INFERENCE: used.inference,
            Stage.TRAINING: used.training,
        }
        known = dict(self.ratios)
        for stage, ratio in ratios.items():
            gain = min(BOUND, max(1 / BOUND, ratio * factors[stage]))
            known[stage] = (*known.get(stage, ()), gain)[-WINDOW:]
        return StageGains(ratios=known)

    def gain(self, stage: Stage) -> float:
        """The factor of a stage; 1 before anything was measured."""
        return median(self.ratios[stage]) if self.ratios.get(stage) else 1.0

    @property
    def efficiency(self) -> dict[str, float]:
        """Neutrally predicted over measured, by stage: falls when the machine slows."""
        return {str(stage): 1 / self.gain(stage) for stage in self.ratios}

    @property
    def calibration(self) -> Calibration:
        """The neutral calibration times the factors."""
        generation = self.gain(Stage.GENERATION)
        return replace(
            NEUTRAL,
            decode=generation,
            prefill=generation,
            decode_step_s=NEUTRAL.decode_step_s * generation,
            inference=self.gain(Stage.INFERENCE),
            training=self.gain(Stage.TRAINING),
        )
