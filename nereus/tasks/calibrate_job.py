"""Calibrate for one job: read the steps that it has run, fit, and keep what was learned about its system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from nereus.config import CampaignConfig, PlanConfig
from nereus.errors import DataError, explain
from nereus.planner.calibration_store import System, save
from nereus.planner.profile import ClusterProfile
from nereus.planner.step_fit import SeenStep, Sizes, StepFit, fit_steps
from nereus.planner.workload import ModelStage, Stage
from nereus.record.metrics import METRICS_FILE, read_records
from nereus.record.step import StepRecord
from nereus.tasks.adapt import STAGE_OF_WORK, request_of
from nereus.tasks.planned_cluster import cluster_of, gpu_kind
from nereus.tasks.scoring import OF_FROZEN, OF_POLICY, early_name
from nereus.tasks.stages import TRAINING, read_models

RESCORE, REFERENCE = "score policy", "score reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedJob:
    """The fit, and the file that `nereus plan --calibration` takes."""

    fit: StepFit
    file: Path


def calibrate_job(config: CampaignConfig, folder: Path, profile: Path) -> CalibratedJob:
    """Learn from the steps in the job's run folder, over the measured `profile`; saves into `folder`.

    Raises DataError where the job has run too few steps, ModelError or ConfigError as a run would.
    """
    path = config.run_folder / METRICS_FILE
    if not path.is_file():
        raise DataError(
            explain("cannot learn from a job", values=f"{path} is absent", remedy="run the campaign first")
        )
    models = read_models(config)
    kind = gpu_kind(config)
    measured = ClusterProfile.from_yaml(profile)
    (pool,) = measured.pools
    measured = replace(measured, pools=(replace(pool, gpus_per_node=config.cluster.gpus),))
    steps = [seen(config, record) for record in read_records(path)]
    if not steps:
        raise DataError(explain(f"cannot learn from {path}", values="it holds no step"))
    try:
        fit = fit_steps(
            steps,
            base=request_of(config, models, max(1, round(steps[0].prompt_tokens))).workload,
            built_in=cluster_of(config),
            measured=measured,
            gpu_kind=kind,
        )
    except ValueError as error:
        raise DataError(explain(f"cannot learn from {path}", values=str(error))) from error
    system = System(
        hardware=kind, engine=config.engines.training, model=Path(models[TRAINING].folder).absolute().name
    )
    return CalibratedJob(fit=fit, file=save(folder, system, fit.calibrator))


def seen(config: CampaignConfig, record: StepRecord) -> SeenStep:
    """What a step's record says to the cost model. Models of one stage that share GPUs follow one another."""
    plan = config.plan_at(record.step)
    sizes = {}
    for name in config.model_stages:
        stage = plan.stage(name)
        sizes[ModelStage(name)] = Sizes(tp=stage.tp, pp=stage.pp, dp=stage.dp, ep=stage.ep, cp=stage.cp)
    in_turn = frozenset(stage for stage in Stage if _share_gpus(config, plan, stage))
    seconds: dict[Stage, float] = {}
    # The cost model counts these as training, by the training engine.
    within = {RESCORE: config.rescores, REFERENCE: config.scores_reference_frozen}
    for work, took_s in record.stage_s.items():
        if (stage_of := STAGE_OF_WORK.get(work)) is not None and not within.get(work):
            if record.stats.get(early_name(work)):
                continue  # in part done while others generated: what is left of it tells nothing
            before_s = seconds.get(stage_of, 0.0)
            seconds[stage_of] = before_s + took_s if stage_of in in_turn else max(before_s, took_s)
    for work in [work for work, counts in within.items() if counts]:
        seconds[Stage.TRAINING] = seconds.get(Stage.TRAINING, 0.0) + record.stage_s.get(work, 0.0)
    if any(record.stats.get(early_name(scoring.what)) for scoring in (OF_POLICY, OF_FROZEN)):
        seconds.pop(Stage.TRAINING, None)
    return SeenStep(
        mean=record.length_mean,
        p95=record.length_p95,
        maximum=record.length_max,
        prompt_tokens=record.prompt_tokens / config.rows,
        sizes=sizes,
        stage_s=seconds,
        step_s=record.step_s,
        in_turn=in_turn,
    )


def _share_gpus(config: CampaignConfig, plan: PlanConfig, stage: Stage) -> bool:
    """Whether two models of a stage have a GPU in common."""
    used = [
        gpu
        for name in config.model_stages
        if ModelStage(name).stage is stage
        for gpu in plan.stage(name).gpu_ids
    ]
    return len(used) > len(set(used))
