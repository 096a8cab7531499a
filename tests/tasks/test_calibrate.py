"""Calibration: measurements become a profile that plans load; a stopped run goes on; steps teach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nereus.emu.decoder import DecoderConfig
from nereus.errors import DataError
from nereus.planner.calibration import NEUTRAL
from nereus.planner.cost import stage_time, step_time
from nereus.planner.lengths import LengthDistribution
from nereus.planner.machine import Deviation
from nereus.planner.profile import ClusterProfile
from nereus.planner.scalars import with_scalars
from nereus.planner.step_fit import SeenStep, Sizes, fit_steps
from nereus.planner.workload import Algorithm, ModelShapes, ModelStage, Schedule, Stage, Workload
from nereus.tasks.calibrate import MEASURED_FILE, QUICK, calibrate_machine, probes

CPU = torch.device("cpu")
SHAPE = DecoderConfig(
    vocab_size=32,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=344,
    max_positions=1024,
)
WORK = Workload(
    algorithm=Algorithm.GRPO,
    models=ModelShapes(actor=SHAPE),
    num_prompts=8,
    num_samples=8,
    prompt_tokens=4,
    response=LengthDistribution.constant(32),
    dtype="float32",
    micro_batch=16,
)
SIZES = {
    ModelStage.ACTOR_GENERATION: Sizes(tp=1, pp=1, dp=2),
    ModelStage.ACTOR_TRAINING: Sizes(tp=2, pp=1, dp=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


def test_a_measured_profile_is_loaded_by_plans_and_prices_the_same_work(folder: Path) -> None:
    told: dict[str, float] = {}
    found = calibrate_machine(folder, CPU, "CPU", effort=QUICK, watch=told.__setitem__)
    assert told == dict.fromkeys(probes(QUICK), 1.0)
    assert {one.name for one in found.deviations} >= {"gemm", "context_attention", "all-reduce"}
    assert all(one.factor > 0 and np.isfinite(one.spread) for one in found.deviations)
    cluster = ClusterProfile.from_yaml(found.profile)
    assert cluster.gpu_kinds == ("CPU",)
    seconds = [
        stage_time(ModelStage.ACTOR_TRAINING, 2, 1, 1, workload=WORK, cluster=one, gpu_kind="CPU").latency_s
        for one in (cluster, ClusterProfile.parse("1x2xCPU"))
    ]
    assert 0 < seconds[0] != seconds[1] > 0


def test_what_was_measured_is_not_measured_again_and_only_for_its_machine(folder: Path) -> None:
    path = folder / MEASURED_FILE
    assert path.is_file(), "the test before has measured"
    before = path.read_bytes()
    found = calibrate_machine(folder, CPU, "CPU", effort=QUICK, watch=lambda name, share: None)
    assert found.kept == tuple(probes(QUICK))
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="another folder"):
        calibrate_machine(folder, CPU, "H200", effort=QUICK, watch=lambda name, share: None)


def test_a_deviation_is_a_factor_and_what_it_leaves() -> None:
    predicted = np.array([1.0, 2.0, 4.0])
    found = Deviation.of("x", 3 * predicted, predicted)
    assert (found.factor, found.spread, found.num_rows) == (pytest.approx(3), pytest.approx(0), 3)


def test_half_of_the_steps_teach_the_time_of_the_others() -> None:
    """Steps of a machine whose scalars are known, with 3 % noise, are predicted to 10 % and not before."""
    cluster = ClusterProfile.parse("1x4xCPU")
    truth = with_scalars(
        with_scalars(NEUTRAL, {"decode": 1.8, "decode_step_ms": 4.0}),
        {"compute": 2.0, "layer_ms": 6.0},
    )
    noise = np.random.default_rng(0).normal(1.0, 0.03, 40)
    steps = []
    for index in range(40):
        step = SeenStep(
            mean=9 + index, p95=22 + 2 * index, maximum=26 + 2.5 * index, prompt_tokens=4, sizes=SIZES,
            stage_s={}, step_s=0.0,
        )  # fmt: skip
        seconds = {
            name: noise[index]
            * stage_time(
                name, size.tp, size.pp, size.dp, workload=step.workload(WORK), cluster=cluster,
                gpu_kind="CPU", calibration=truth,
            ).latency_s
            for name, size in SIZES.items()
        }  # fmt: skip
        stage_s = {name.stage: float(value) for name, value in seconds.items()}
        steps.append(replace(step, stage_s=stage_s, step_s=step_time(seconds, Schedule.SYNC) + 0.03))
    fit = fit_steps(steps, base=WORK, built_in=cluster, measured=cluster, gpu_kind="CPU")
    assert fit.learned_error <= 10 < 30 < fit.built_in_error
    assert fit.driver_s == pytest.approx(0.03, abs=0.02)
    assert set(steps[0].stage_s) == {Stage.GENERATION, Stage.TRAINING}
    with pytest.raises(ValueError, match="at least"):
        fit_steps(steps[:6], base=WORK, built_in=cluster, measured=cluster, gpu_kind="CPU")


def test_models_that_share_gpus_follow_one_another() -> None:
    """Two models of one stage in turn take the sum of what they take side by side."""
    cluster = ClusterProfile.parse("1x4xCPU")
    work = replace(
        WORK, algorithm=Algorithm.PPO, models=ModelShapes(actor=SHAPE, critic=SHAPE.with_head("value"))
    )
    one = Sizes(tp=1, pp=1, dp=1)
    sizes = {ModelStage.ACTOR_TRAINING: one, ModelStage.CRITIC_TRAINING: one}
    apart = SeenStep(
        mean=20, p95=40, maximum=60, prompt_tokens=4, sizes=sizes, stage_s={}, step_s=1.0
    )  # fmt: skip
    errors = []
    for step in (apart, replace(apart, in_turn=frozenset({Stage.TRAINING}))):
        each = [
            stage_time(
                name, 1, 1, 1, workload=step.workload(work), cluster=cluster, gpu_kind="CPU"
            ).latency_s
            for name in sizes
        ]  # fmt: skip
        took_s = sum(each) if step.in_turn else max(each)
        seen = replace(step, step_s=took_s, stage_s={Stage.TRAINING: took_s})
        fit = fit_steps([seen] * 8, base=work, built_in=cluster, measured=cluster, gpu_kind="CPU")
        errors.append(fit.built_in_error)
    assert errors == [pytest.approx(0, abs=1e-9)] * 2
