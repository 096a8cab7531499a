"""Online calibration finds the machine's factors and is not thrown by outliers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.planner.calibrate import CLASSES, MAX_GAIN, Calibrator, Gain, StageFit
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.cost import stage_time
from nereus.planner.kernel_time import gemm_s
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile, gpu_profile
from nereus.planner.scalars import GENERATION, SCORING, TRAINING, features, fit_scalars, with_scalars
from nereus.planner.workload import Algorithm, ModelShapes, ModelStage, Workload

CLUSTER = ClusterProfile.parse("2x8xH100")


@given(
    gain=st.floats(0.3, 5.0),
    outliers=st.floats(0.0, 0.4),
    wild=st.sampled_from([0.0, 1e-6, 50.0, 1e9, math.inf, math.nan]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_gain_is_found_among_outliers(gain: float, outliers: float, wild: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    estimate = Gain()
    for _ in range(25):
        predicted = generator.uniform(1e-5, 1e-3, 15)
        measured = predicted * gain * np.exp(generator.normal(0, 0.05, 15))
        bad = generator.permutation(15)[: int(15 * outliers)]
        measured[bad] = predicted[bad] * wild
        estimate = estimate.observed(predicted.tolist(), measured.tolist())
    # Less than half of a batch lies; the median of 15 with up to 6 on one side shifts by about one sigma.
    assert estimate.value == pytest.approx(gain, rel=0.12)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_gain_stays_within_its_bounds(ratios: list[float]) -> None:
    estimate = Gain()
    for ratio in ratios:
        estimate = estimate.observed([1.0], [ratio])
        assert 1 / MAX_GAIN - 1e-9 <= estimate.value <= MAX_GAIN + 1e-9


@given(wild=st.floats(1e-6, 1e6), settled=st.integers(1, 30))
def test_one_wild_batch_moves_a_settled_gain_little(wild: float, settled: int) -> None:
    estimate = Gain()
    for _ in range(settled):
        estimate = estimate.observed([1.0] * 8, [2.0] * 8)
    after = estimate.observed([1.0] * 8, [2.0 * wild] * 8)
    assert abs(math.log(after.value / estimate.value)) <= 0.35 + 1e-9


def test_gain_follows_a_machine_that_changes() -> None:
    estimate = Gain()
    for ratio in [1.0] * 50 + [1.6] * 60:
        estimate = estimate.observed([1.0] * 4, [ratio] * 4)
    assert estimate.value == pytest.approx(1.6, rel=0.01)


def test_nothing_measured_changes_nothing() -> None:
    assert Gain().observed([], []) == Gain()
    assert Gain().observed([1.0], [0.0]) == Gain()
    assert Calibrator().base == NEUTRAL


def test_unknown_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="classes are"):
        Calibrator().observed("softmax", [1.0], [1.0])


def test_class_gains_reach_the_cost_model() -> None:
    calibrator = Calibrator()
    for name in CLASSES:
        calibrator = calibrator.observed(name, [1.0] * 9, [1.5] * 9)
    base = calibrator.base
    assert base.gemm == base.scale_out == base.host == pytest.approx(1.5)


@given(
    truth=st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0), st.floats(0.0, 5.0)),
    seed=st.integers(0, 1000),
    wild=st.floats(0.01, 100.0),
)
@settings(max_examples=40, deadline=None)
def test_scalars_are_found_among_outliers(truth: tuple[float, float, float], seed: int, wild: float) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.uniform(1e-3, 1e-2, (40, 3)) * [3.0, 1.0, 0.5]
    seconds = rows @ truth * np.exp(generator.normal(0, 0.01, 40))
    seconds[generator.permutation(40)[:8]] *= wild
    found = fit_scalars(rows, seconds)
    # 1 % noise, a fifth of the rows wild to the same side; single rows at the edge may bend more.
    assert np.abs(rows @ found / (rows @ truth) - 1).mean() < 0.04


ROWS = st.tuples(st.integers(0, 10_000), st.integers(6, 30))


def some_rows(case: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Feature rows, and seconds of hidden scalars with 5 % noise."""
    generator = np.random.default_rng(case[0])
    rows = generator.uniform(1e-3, 1e-2, (case[1], 3)) * [3.0, 1.0, 0.5]
    return rows, rows @ generator.uniform(0.2, 4.0, 3) * np.exp(generator.normal(0, 0.05, case[1]))


@given(case=ROWS, factor=st.floats(0.05, 20.0))
@settings(max_examples=30, deadline=None)
def test_a_machine_that_is_slower_throughout_has_larger_scalars_and_nothing_else(
    case: tuple[int, int], factor: float
) -> None:
    rows, seconds = some_rows(case)
    plain, slow = fit_scalars(rows, seconds), fit_scalars(rows, factor * seconds)
    # Iterations stop after a fixed number; on noisy rows their last digits depend on the scale.
    assert rows @ slow == pytest.approx(factor * (rows @ plain), rel=1e-3)


@given(case=ROWS, order=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_steps_teaches_nothing(case: tuple[int, int], order: random.Random) -> None:
    rows, seconds = some_rows(case)
    places = list(range(len(rows)))
    order.shuffle(places)
    assert rows @ fit_scalars(rows[places], seconds[places]) == pytest.approx(
        rows @ fit_scalars(rows, seconds), rel=1e-6
    )


@given(case=ROWS)
@settings(max_examples=30, deadline=None)
def test_scalars_are_never_negative_and_fit_better_than_the_prior(case: tuple[int, int]) -> None:
    rows, seconds = some_rows(case)
    found = fit_scalars(rows, seconds, (1.0, 1.0, 1.0), 1e-6)
    assert (found >= 0).all()

    def error(scalars: np.ndarray) -> float:
        return float(np.median(np.abs(rows @ scalars / seconds - 1)))

    # Medians of 5 % noise: what a fit of three scalars to six rows may add.
    assert error(found) <= error(np.ones(3)) + 0.05


@given(case=ROWS)
@settings(max_examples=20, deadline=None)
def test_what_one_kind_of_stage_teaches_changes_no_other(case: tuple[int, int]) -> None:
    rows, seconds = some_rows(case)
    before = after = Calibrator().with_generation(rows[0], float(seconds[0]))
    for row, second in zip(rows, seconds, strict=True):
        after = after.with_training((*row, 0.0), float(second)).with_scoring(row[:2], float(second))
    assert after.generation == before.generation
    names = ("gemm", "elementwise", "scale_up", "scale_out", "decode", "prefill", "decode_step_s")
    for name in names:
        assert getattr(after.calibration, name) == getattr(before.calibration, name)


def test_prior_decides_what_the_rows_leave_open() -> None:
    rows = [(1.0, 1.0)] * 5  # both scalars always together: only their sum is seen
    found = fit_scalars(rows, [3.0] * 5, prior=(2.0, 1.0), prior_weight=0.01)
    assert found == pytest.approx([2.0, 1.0], rel=0.01)


def workload(prompts: int, mean: float) -> Workload:
    return Workload(
        algorithm=Algorithm.GRPO,
        models=ModelShapes.same(model_shape("llama-3.1-8b"), Algorithm.GRPO),
        num_prompts=prompts,
        prompt_tokens=512,
        response=LengthDistribution.from_mean_p95_max(mean, 2 * mean, 4 * mean),
    )


@pytest.mark.parametrize(
    ("stage", "names", "truth"),
    [
        (ModelStage.ACTOR_GENERATION, GENERATION, {"decode": 1.4, "prefill": 0.8, "decode_step_ms": 3.0}),
        (
            ModelStage.ACTOR_TRAINING,
            TRAINING,
            {"compute": 1.5, "network": 2.0, "layer_ms": 0.6, "hop_ms": 1.3},
        ),
    ],
)
def test_calibrated_stage_predicts_the_machine(
    stage: ModelStage, names: tuple[str, ...], truth: dict[str, float]
) -> None:
    """A machine with hidden scalars: after a dozen varied stages the next one is predicted."""
    hidden = with_scalars(NEUTRAL, truth)
    fit = StageFit.fresh(names)
    generator = np.random.default_rng(0)
    for _ in range(16):
        tp, pp, dp = (int(generator.choice(sizes)) for sizes in ([1, 2, 4, 8], [1, 2, 4], [1, 2, 4]))
        work = workload(int(generator.integers(64, 512)), float(generator.uniform(300, 2000)))

        def price(calibration, tp=tp, pp=pp, dp=dp, work=work):  # type: ignore[no-untyped-def]
            cost = stage_time(
                stage, tp, pp, dp, workload=work, cluster=CLUSTER, gpu_kind="H100", calibration=calibration
            )
            return cost.latency_s

        fit = fit.observed(features(price, names), price(hidden) * float(np.exp(generator.normal(0, 0.02))))
    work = workload(300, 1500.0)
    learned = with_scalars(NEUTRAL, fit.scalars)
    times = [
        stage_time(
            stage, 2, 2, 2, workload=work, cluster=CLUSTER, gpu_kind="H100", calibration=calibration
        ).latency_s
        for calibration in (hidden, learned, NEUTRAL)
    ]
    # 2 % noise a stage; overlap and the slowest stage bend the linear features by a few percent.
    assert times[1] == pytest.approx(times[0], rel=0.05)
    assert abs(times[2] / times[0] - 1) > 0.15


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_unusable_stage_is_left_out(bad: float) -> None:
    fit = StageFit.fresh(GENERATION)
    assert fit.observed((1.0, 1.0, 1.0), bad) == fit
    assert fit.observed((bad if bad else -1.0, 1.0, 1.0), 1.0) == fit


def test_window_forgets_old_stages() -> None:
    fit = StageFit.fresh(GENERATION)
    for _ in range(80):
        fit = fit.observed((1.0, 0.2, 0.001), 1.0)
    assert len(fit.rows) == 64


def test_faded_prior_gives_way_to_new_rows() -> None:
    old = Calibrator()
    for _ in range(20):
        old = old.with_generation((1.0, 0.1, 0.0), 2.0)
    prior = old.faded(0.5)
    assert prior.generation.scalars["decode"] == old.generation.scalars["decode"]
    assert prior.generation.rows == ()
    new = prior
    for _ in range(20):
        new = new.with_generation((1.0, 0.1, 0.0), 1.2)
    row = np.array([1.0, 0.1, 0.0])
    assert row @ np.array(new.generation.values) == pytest.approx(1.2, rel=0.02)


def test_calibrator_keeps_gains_and_scalars_apart() -> None:
    calibrator = Calibrator().observed("gemm", [1.0] * 9, [2.0] * 9)
    calibrator = replace(calibrator, training=replace(calibrator.training, values=(3.0, 1.0, 0.1, 0.1)))
    assert calibrator.base.gemm == pytest.approx(2.0)
    assert calibrator.calibration.in_training.gemm == pytest.approx(6.0)
    assert calibrator.calibration.in_training.elementwise == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(6))
def test_every_kind_of_stage_gets_its_own_scalars(seed: int) -> None:
    """A machine that decodes, scores and trains at unrelated speeds is predicted in all three."""
    generator = np.random.default_rng(seed)
    truth, host = generator.uniform(0.4, 3.0, 3).tolist(), generator.uniform(0.0, 2.0, 3).tolist()
    hidden = with_scalars(
        NEUTRAL,
        {
            "decode": truth[0], "prefill": truth[0], "decode_step_ms": host[0],
            "score_compute": truth[1], "score_layer_ms": host[1],
            "compute": truth[2], "network": truth[2], "layer_ms": host[2], "hop_ms": 0.0,
        },
    )  # fmt: skip
    stages = {
        ModelStage.ACTOR_GENERATION: (GENERATION, Calibrator.with_generation),
        ModelStage.REFERENCE_INFERENCE: (SCORING, Calibrator.with_scoring),
        ModelStage.ACTOR_TRAINING: (TRAINING, Calibrator.with_training),
    }
    calibrator = Calibrator()
    lengths = generator.uniform(300, 2000, 9)

    def price(stage: ModelStage, mean: float, calibration: Calibration) -> float:
        work = workload(64, float(mean))
        return stage_time(
            stage, 2, 1, 1, workload=work, cluster=CLUSTER, gpu_kind="H100", calibration=calibration
        ).latency_s

    for mean in lengths[1:]:
        for stage, (names, learn) in stages.items():
            row = features(partial(price, stage, mean), names)
            noise = float(np.exp(generator.normal(0, 0.01)))
            calibrator = learn(calibrator, row, price(stage, mean, hidden) * noise)
    for stage in stages:
        predicted, took = (price(stage, lengths[0], one) for one in (calibrator.calibration, hidden))
        # 1 % noise a stage, the prior's pull on eight rows, and lengths outside those that taught. One unit:
        # where gradients overlap with compute, time bends between the features.
        assert predicted == pytest.approx(took, rel=0.06), stage


def test_without_scoring_stages_scoring_is_priced_as_trainings_forward_pass() -> None:
    calibrator = Calibrator()
    calibrator = replace(calibrator, training=replace(calibrator.training, values=(3.0, 1.0, 0.5, 0.1)))
    found = calibrator.calibration
    assert found.in_scoring.gemm == pytest.approx(3.0)
    assert found.in_scoring.layer_s == pytest.approx(0.5e-3)
    assert found.gemm == 1.0, "generation's"
    assert calibrator.faded(0.5).calibration == found


def test_timed_terms_teach_their_classes() -> None:
    predicted = {"gemm": 1.0, "bubble": 3.0, "data_parallel": 0.5, "host": 0.1}
    measured = {"gemm": 1.5, "bubble": 9.0, "data_parallel": 1.5, "elementwise": 2.0}
    after = Calibrator().with_terms(predicted, measured)
    assert after.base.gemm == pytest.approx(1.5)
    assert after.base.scale_out == pytest.approx(3.0)
    assert set(after.gains) == {"gemm", "scale_out"}


@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_probe_tells_whether_the_tables_library_runs_here(truth: float) -> None:
    gpu = gpu_profile("H100")
    generator = np.random.default_rng(0)
    m, n, k = (2.0 ** generator.integers(low, high, 32) for low, high in ((0, 13), (9, 15), (9, 15)))
    noise = np.exp(generator.normal(0, 0.02, 32))

    def predict(weight: float) -> np.ndarray:
        return gemm_s(gpu, m, n, k, weight=weight)

    after = Calibrator().with_products(predict, 1.3 * predict(truth) * noise)
    assert after.correction == truth
    assert after.base.correction == truth
    assert after.base.gemm == pytest.approx(1.3, rel=0.02)
