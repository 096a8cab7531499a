"""What a job's own steps teach: the scalars of its generation and training, and how well steps are predicted.

Steps are learned from and judged in turn: every second one fits, the others tell the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.planner.calibrate import Calibrator, StageFit
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.cost import stage_time
from nereus.planner.lengths import LengthDistribution
from nereus.planner.profile import ClusterProfile
from nereus.planner.scalars import GENERATION, SCORING, TRAINING, features, with_scalars
from nereus.planner.workload import ModelStage, Stage, Workload

WARM_UP = 1  # a job's first step compiles and connects
PULL = 1e-4  # towards the general prior: weak, for the lengths of a job's steps differ enough to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The layout of a model-stage: `dp` units of (tp, pp, ep, cp)."""

    tp: int
    pp: int
    dp: int
    ep: int = 1
    cp: int = 1


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
        response = LengthDistribution.of_step(self.mean, self.p95, self.maximum, base.num_generated)
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
                name, size.tp, size.pp, size.dp, size.ep, size.cp, workload=work, cluster=self.cluster,
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
    calibrator = _taught(teach, price)
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


def _taught(teach: Sequence[SeenStep], price: _Priced) -> Calibrator:
    """The scalars of each kind of stage, from its own seconds; a kind that did not run stays as it was."""
    generation, scoring, training = (
        replace(StageFit.fresh(names), prior_weight=PULL) for names in (GENERATION, SCORING, TRAINING)
    )
    for step in teach:
        generation = _after(generation, step, Stage.GENERATION, price, NEUTRAL)
        training = _after(training, step, Stage.TRAINING, price, NEUTRAL)
    # What scoring hands between pipeline stages costs what it costs in training.
    trained = with_scalars(NEUTRAL, training.scalars)
    for step in teach:
        scoring = _after(scoring, step, Stage.INFERENCE, price, trained)
    return Calibrator(generation=generation, scoring=scoring, training=training)


def _after(fit: StageFit, step: SeenStep, stage: Stage, price: _Priced, base: Calibration) -> StageFit:
    """The fit after one step; what its scalars do not scale is taken off both sides."""
    of_stage = price.stage(step, stage)
    fixed_s = of_stage(with_scalars(base, dict.fromkeys(fit.names, 0.0)))
    row = features(of_stage, fit.names, base) - fixed_s
    return fit.observed(row, step.stage_s.get(stage, 0.0) - fixed_s)


def _error(steps: Sequence[SeenStep], predict: Callable[[SeenStep], float]) -> float:
    return float(100 * np.mean([abs(predict(step) / step.step_s - 1) for step in steps]))
