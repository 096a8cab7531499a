"""Stage and step times: arrays equal scalars, and more hardware or less work is never slower than it
should be.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.lora import Lora
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.candidates import distinct
from nereus.planner.cost import publish_times, stage_time, stage_times, step_time
from nereus.planner.forward_time import exposed_s
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.workload import Algorithm, ModelShapes, ModelStage, Recompute, Schedule, Workload

CLUSTER = ClusterProfile.parse("4x8xH100")
WORKLOAD = Workload(
    algorithm=Algorithm.PPO,
    models=ModelShapes.same(model_shape("llama-3.1-8b"), Algorithm.PPO),
    num_prompts=512,
    prompt_tokens=512,
    response=LengthDistribution.from_mean_p95_max(1024, 1900, 2048),
)
STAGES = tuple(ModelStage)


def latency(stage: ModelStage, tp: int, pp: int, dp: int, workload: Workload = WORKLOAD) -> float:
    return stage_time(stage, tp, pp, dp, workload=workload, cluster=CLUSTER, gpu_kind="H100").latency_s


@pytest.mark.parametrize("stage", STAGES)
def test_arrays_give_what_scalars_give(stage: ModelStage) -> None:
    generator = np.random.default_rng(3)
    tp, pp, dp = (generator.integers(1, high, 40) for high in (9, 9, 40))
    many = stage_times(stage, tp, pp, dp, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100")
    for index in range(0, 40, 7):
        one = stage_time(
            stage,
            int(tp[index]),
            int(pp[index]),
            int(dp[index]),
            workload=WORKLOAD,
            cluster=CLUSTER,
            gpu_kind="H100",
        )
        # The decode table's grid of batch sizes ends at the largest batch of the call, which moves no knot.
        assert many.at(index).latency_s == pytest.approx(one.latency_s, rel=1e-9)
        assert sum(one.terms.values()) == pytest.approx(one.latency_s)


@pytest.mark.parametrize("stage", STAGES)
def test_terms_are_never_negative(stage: ModelStage) -> None:
    tp, pp, dp = (axis.ravel() for axis in np.meshgrid([1, 3, 8], [1, 3, 5, 32], [1, 7, 600]))
    costs = stage_times(stage, tp, pp, dp, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100")
    assert all((term >= -1e-12).all() for term in costs.terms.values())


@pytest.mark.parametrize("stage", STAGES)
def test_twice_the_units_take_less_time(stage: ModelStage) -> None:
    assert latency(stage, 1, 1, 16) < latency(stage, 1, 1, 8)
    # No more than twice as fast, but for whole micro-batches.
    assert latency(stage, 1, 1, 16) > 0.49 * latency(stage, 1, 1, 8)


def test_frozen_weights_cost_no_gradient_and_the_reference_in_place_a_forward_pass() -> None:
    shape = model_shape("llama-3.1-8b").with_lora(Lora(rank=16, alpha=32))
    adapted = replace(WORKLOAD, models=ModelShapes.same(shape, Algorithm.PPO), recompute=Recompute.NONE)

    def terms(workload: Workload) -> dict[str, float]:
        train = ModelStage.ACTOR_TRAINING
        cost = stage_time(train, 2, 1, 8, workload=workload, cluster=CLUSTER, gpu_kind="H100")
        return dict(cost.terms)

    whole, thin = terms(replace(WORKLOAD, recompute=Recompute.NONE)), terms(adapted)
    assert thin["gemm"] == pytest.approx(whole["gemm"] * 2 / 3)
    assert thin["attention"] == whole["attention"]
    assert thin["optimizer"] < whole["optimizer"] / 50
    assert thin["data_parallel"] <= whole["data_parallel"]
    placed = terms(replace(adapted, frozen_reference=True))
    assert placed.pop("frozen_reference") == pytest.approx(thin["old_logprobs"])
    assert placed == thin


def test_pipeline_bubble_shrinks_with_more_micro_batches() -> None:
    def bubble(prompts: int) -> float:
        cost = stage_time(
            ModelStage.CRITIC_TRAINING,
            1,
            4,
            1,
            workload=replace(WORKLOAD, num_prompts=prompts),
            cluster=CLUSTER,
            gpu_kind="H100",
        )
        return cost.terms["bubble"] / cost.latency_s

    # (p - 1) / (m + p - 1) of an even pipeline: 3 / 11 with 8 micro-batches, 3 / 67 with 64.
    assert bubble(8) == pytest.approx(3 / 11, rel=0.1)
    assert bubble(64) == pytest.approx(3 / 67, rel=0.1)


def test_head_makes_the_last_stage_the_slowest() -> None:
    actor = stage_time(
        ModelStage.REFERENCE_INFERENCE, 1, 8, 1, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100"
    )
    critic = stage_time(
        ModelStage.CRITIC_INFERENCE, 1, 8, 1, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100"
    )
    assert actor.terms["bubble"] > 2 * critic.terms["bubble"]


@pytest.mark.parametrize("stage", STAGES)
def test_single_precision_takes_about_twice_as_long(stage: ModelStage) -> None:
    wide = replace(WORKLOAD, dtype="float32")
    assert 1.3 < latency(stage, 1, 1, 8, wide) / latency(stage, 1, 1, 8) < 2.2


def test_full_recompute_costs_a_forward_pass() -> None:
    none = latency(ModelStage.CRITIC_TRAINING, 1, 1, 8, WORKLOAD.with_options(recompute=Recompute.NONE))
    full = latency(ModelStage.CRITIC_TRAINING, 1, 1, 8, WORKLOAD.with_options(recompute=Recompute.FULL))
    selective = latency(
        ModelStage.CRITIC_TRAINING, 1, 1, 8, WORKLOAD.with_options(recompute=Recompute.SELECTIVE)
    )
    assert full / none == pytest.approx(4 / 3, rel=0.03)
    assert none < selective < full


@given(st.integers(600, 4000), st.floats(1.2, 3.0))
@settings(max_examples=15, deadline=None)
def test_longer_tails_take_longer_at_the_same_mean(mean: int, spread: float) -> None:
    even = WORKLOAD.with_response(LengthDistribution.constant(mean))
    long = WORKLOAD.with_response(LengthDistribution.from_mean_p95_max(mean, mean * spread, mean * 6))
    stage = ModelStage.ACTOR_GENERATION
    assert latency(stage, 1, 1, 8, long) > 1.05 * latency(stage, 1, 1, 8, even)


def test_constant_lengths_take_as_many_steps_as_tokens() -> None:
    steps = 777
    workload = WORKLOAD.with_response(LengthDistribution.constant(steps))
    calibration = replace(NEUTRAL, decode_step_s=1.0, decode=0.0, prefill=0.0)
    cost = stage_time(
        ModelStage.ACTOR_GENERATION,
        1,
        1,
        8,
        workload=workload,
        cluster=CLUSTER,
        gpu_kind="H100",
        calibration=calibration,
    )
    # The cell that holds the point mass is averaged over max / 1024.
    assert cost.latency_s == pytest.approx(steps, rel=0.002)


def test_queue_of_waiting_sequences_takes_as_many_steps_as_it_needs() -> None:
    """n sequences of mean length through r places need n / r times the mean, and a drain on top."""
    calibration = replace(NEUTRAL, decode_step_s=1.0, decode=0.0, prefill=0.0)
    response = LengthDistribution.from_mean_p95_max(1000, 2500, 4096)
    workload = replace(WORKLOAD.with_response(response), num_prompts=64 * 32, max_resident=64)
    cost = stage_time(
        ModelStage.ACTOR_GENERATION,
        1,
        1,
        1,
        workload=workload,
        cluster=CLUSTER,
        gpu_kind="H100",
        calibration=calibration,
    )
    simulated = []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        cumulative = np.concatenate(([0.0], np.cumsum(response.shares)))
        lengths = np.interp(generator.uniform(size=64 * 32), cumulative, response.edges_tokens)
        places = np.zeros(64)
        for length in lengths:  # each place takes the next sequence as soon as it is free
            places[places.argmin()] += length
        simulated.append(places.max())
    assert cost.latency_s == pytest.approx(np.mean(simulated), rel=0.03)


@pytest.mark.parametrize("dp", [1, 8])
def test_generation_ends_with_the_longest_response_of_all_units(dp: int) -> None:
    calibration = replace(NEUTRAL, decode_step_s=1.0, decode=0.0, prefill=0.0)
    response = LengthDistribution.from_mean_p95_max(1000, 2500, 8192)
    cost = stage_time(
        ModelStage.ACTOR_GENERATION,
        1,
        1,
        dp,
        workload=replace(WORKLOAD.with_response(response), num_prompts=256),
        cluster=CLUSTER,
        gpu_kind="H100",
        calibration=calibration,
    )
    cumulative = np.concatenate(([0.0], np.cumsum(response.shares)))
    uniform = np.random.default_rng(0).uniform(size=(4000, 256))
    longest = np.interp(uniform.max(1), cumulative, response.edges_tokens).mean()
    # 24 cells over the tail: 3 % on the expected maximum.
    assert cost.latency_s == pytest.approx(longest, rel=0.03)


def test_pipelined_generation_buys_no_time() -> None:
    stage = ModelStage.ACTOR_GENERATION
    assert latency(stage, 1, 4, 2) > latency(stage, 4, 1, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_calibration_scales_what_it_names(stage: ModelStage) -> None:
    def terms(calibration: Calibration) -> dict[str, float]:
        cost = stage_time(
            stage, 2, 2, 2, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100", calibration=calibration
        )
        return dict(cost.terms)

    plain, slow = terms(NEUTRAL), terms(replace(NEUTRAL, scale_up=3.0))
    assert slow["tensor_parallel"] == pytest.approx(3 * plain["tensor_parallel"])
    doubled = terms(replace(NEUTRAL, inference=2.0, training=2.0, decode=2.0, prefill=2.0))
    grown = {name: value / plain[name] for name, value in doubled.items() if plain[name] > 0}
    grown.pop("host", None)  # host seconds are not a factor
    assert all(value == pytest.approx(2.0) for value in grown.values())


def test_publishing_moves_one_shard_over_the_network() -> None:
    whole, quarter = publish_times(
        ModelStage.ACTOR_GENERATION, [1, 4], [1, 1], workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100"
    )
    assert whole == pytest.approx(4 * quarter, rel=0.02)
    assert whole > 2 * 8.03e9 / 50e9  # 16-bit weights at the full rate of the link


def test_hidden_communication_costs_what_overlap_slows_down() -> None:
    communication, compute = np.array([0.0, 1.0, 5.0]), np.array([4.0, 4.0, 4.0])
    nothing, hidden, exposed = exposed_s(communication, compute)
    assert nothing == 0
    assert hidden == pytest.approx(0.1256)
    assert exposed == pytest.approx(1.0 + 4 * 0.1256)


def test_synchronous_steps_add_stages_and_asynchronous_ones_take_the_longer_side() -> None:
    times = {
        ModelStage.ACTOR_GENERATION: 10.0,
        ModelStage.CRITIC_INFERENCE: 2.0,
        ModelStage.REFERENCE_INFERENCE: 3.0,
        ModelStage.ACTOR_TRAINING: 6.0,
        ModelStage.CRITIC_TRAINING: 5.0,
    }
    publish = {ModelStage.ACTOR_GENERATION: 0.5}
    assert step_time(times, Schedule.SYNC, publish_s=publish) == 19.5
    assert step_time(times, Schedule.ONE_STEP_OFF, publish_s=publish) == 10.5
    assert step_time(times, Schedule.ASYNC) == 10.0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 4000)), min_size=1, max_size=60)
)
def test_distinct_rows_bring_every_row_back(rows: list[tuple[int, int, int]]) -> None:
    columns = tuple(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    found, back = distinct(*columns)
    assert len(found[0]) == len(set(rows))
    assert all((small[back] == column).all() for small, column in zip(found, columns, strict=True))


def test_sixty_thousand_candidates_are_priced_in_a_blink() -> None:
    import time

    generator = np.random.default_rng(0)
    sizes = [generator.integers(1, high, 60_000) for high in (9, 17, 300)]
    began = time.process_time()
    for stage in STAGES:
        stage_times(stage, *sizes, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100")
    # About 0.1 s of CPU for all six here; the bound leaves room for a slow machine.
    assert time.process_time() - began < 1.5
