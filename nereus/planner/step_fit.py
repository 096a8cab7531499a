"""What a job's own steps teach: the scalars of its generation and training, and how well steps are predicted.

Steps are learned from and judged in turn: every second one fits, the others tell the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.errors import ConfigError
from nereus.planner.calibrate import Calibrator, StageFit
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.cost import stage_time
from nereus.planner.lengths import LengthDistribution
from nereus.planner.profile import ClusterProfile
from nereus.planner.scalars import GENERATION, TRAINING, features, with_scalars
from nereus.planner.workload import ModelStage, Stage, Workload

WARM_UP = 1  # a job's first step compiles and connects
PULL = 1e-4  # towards the general prior: weak, for the lengths of a job's steps differ enough to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The layout of a model-stage: `dp` units of (tp, pp)."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """One step of a job: its responses, its plan, seconds by stage of work, and of the whole."""

    mean: float
    p95: float
    maximum: float
    prompt_tokens: float
    sizes: Mapping[ModelStage, Sizes]
    stage_s: Mapping[Stage, float]
    step_s: float
    in_turn: frozenset[Stage] = frozenset()
    """Stages whose models share GPUs, and so follow one another."""

    def workload(self, base: Workload) -> Workload:
        """The job's work with this step's lengths."""
        p95 = min(max(self.p95, self.mean), self.maximum)
        try:
            response = LengthDistribution.from_mean_p95_max(self.mean, p95, self.maximum)
        except ConfigError:  # no distribution of the assumed form has these three numbers
            response = LengthDistribution.constant(self.mean)
        return replace(base.with_response(response), prompt_tokens=max(1, round(self.prompt_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """What was learned, and the mean absolute relative errors of step times in percent, on steps that did not
    teach: with the built-in profile, with the measured one, and with what was learned.

    `driver_s` are seconds of a step outside the stages that the cost model has: scheduling, rewards, records.
    """

    calibrator: Calibrator
    driver_s: float
    num_steps: int
    built_in_error: float
    measured_error: float
    learned_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """Prices steps of one job on one cluster."""

    base: Workload
    cluster: ClusterProfile
    gpu_kind: str

    def stages(self, step: SeenStep, calibration: Calibration) -> dict[ModelStage, float]:
        work = step.workload(self.base)
        return {
            name: stage_time(
                name, size.tp, size.pp, size.dp, workload=work, cluster=self.cluster,
                gpu_kind=self.gpu_kind, calibration=calibration,
            ).latency_s
            for name, size in step.sizes.items()
        }  # fmt: skip

    def step(self, step: SeenStep, calibration: Calibration) -> float:
        return sum(self.stage(step, stage)(calibration) for stage in Stage)

    def stage(self, step: SeenStep, stage: Stage) -> Callable[[Calibration], float]:
        def price(calibration: Calibration) -> float:
            found = [time for name, time in self.stages(step, calibration).items() if name.stage is stage]
            return sum(found) if stage in step.in_turn else max(found, default=0.0)

        return price


def fit_steps(
    steps: Sequence[SeenStep],
    *,
    base: Workload,
    built_in: ClusterProfile,
    measured: ClusterProfile,
    gpu_kind: str,
) -> StepFit:
    """Learn from every second step after the first and judge by the others.

    Raises ValueError for fewer than six steps.
    """
    kept = steps[WARM_UP:]
    if len(kept) < 6:
        raise ValueError(f"{len(steps)} steps; at least {6 + WARM_UP} are needed")
    teach, judge = kept[::2], kept[1::2]
    price = _Priced(base=base, cluster=measured, gpu_kind=gpu_kind)
    calibrator = Calibrator(
        generation=replace(StageFit.fresh(GENERATION), prior_weight=PULL),
        training=replace(StageFit.fresh(TRAINING), prior_weight=PULL),
    )
    for step in teach:
        row = features(price.stage(step, Stage.TRAINING), TRAINING)
        calibrator = calibrator.with_training(row, step.stage_s.get(Stage.TRAINING, 0.0))
    # In a calibration training's factor on kernels holds for generation, too; its own scalars lie on top.
    trained = with_scalars(NEUTRAL, calibrator.training.scalars)
    for step in teach:
        row = features(price.stage(step, Stage.GENERATION), GENERATION, trained)
        calibrator = calibrator.with_generation(row, step.stage_s.get(Stage.GENERATION, 0.0))
    learned = calibrator.calibration
    driver_s = float(np.median([step.step_s - price.step(step, learned) for step in teach]))
    plain = _Priced(base=base, cluster=built_in, gpu_kind=gpu_kind)
    return StepFit(
        calibrator=calibrator,
        driver_s=driver_s,
        num_steps=len(judge),
        built_in_error=_error(judge, lambda step: plain.step(step, NEUTRAL)),
        measured_error=_error(judge, lambda step: price.step(step, NEUTRAL)),
        learned_error=_error(judge, lambda step: price.step(step, learned) + driver_s),
    )


def _error(steps: Sequence[SeenStep], predict: Callable[[SeenStep], float]) -> float:
    return float(100 * np.mean([abs(predict(step) / step.step_s - 1) for step in steps]))
