"""Candidates are complete, priced as the cost model says, and obey what is fixed."""

from __future__ import annotations

import numpy as np
import pytest

from nereus.errors import ConfigError
from nereus.planner.candidate_set import CandidateSet, candidate_sets, effective
from nereus.planner.choose import best_plan
from nereus.planner.cost import stage_time
from nereus.planner.fixed import Choice, chosen, parse_fix, parse_fixes
from nereus.planner.layouts import Space, tensor_sizes, unit_counts
from nereus.planner.memory import stage_memory
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import Option
from nereus.planner.workload import ModelStage, Recompute
from tests.planner.plan_requests import request


def of(sets: tuple[CandidateSet, ...], model_stage: ModelStage) -> CandidateSet:
    return next(item for item in sets if item.model_stage is model_stage)


@pytest.mark.parametrize("model_stage", list(ModelStage))
def test_rows_carry_the_cost_model_of_one_candidate(model_stage: ModelStage) -> None:
    asked = request()
    item = of(candidate_sets(asked), model_stage)
    rng = np.random.default_rng(0)
    for row in rng.choice(len(item.seat), size=5, replace=False).tolist():
        work = item.options[item.option[row]].apply(asked.workload)
        sizes = int(item.tp[row]), int(item.pp[row]), int(item.dp[row])
        cost = stage_time(model_stage, *sizes, workload=work, cluster=asked.cluster, gpu_kind="H100")
        memory = stage_memory(model_stage, *sizes, workload=work, cluster=asked.cluster, gpu_kind="H100")
        assert item.seat.latency_s[row] == pytest.approx(cost.latency_s, rel=1e-9)
        # The single form rounds bytes down to whole ones.
        assert item.seat.persistent_bytes[row] == pytest.approx(memory.persistent_bytes, abs=2)
        assert item.seat.transient_bytes[row] == pytest.approx(memory.transient_bytes, abs=2)
        assert item.seat.gpus[row] == np.prod(sizes)


def test_general_space_holds_powers_of_two_and_is_never_worse() -> None:
    for fixed in ("", "actor.training.recompute=full"):
        narrow = best_plan(request("3x8xH100", fixed=fixed))
        wide = best_plan(request("3x8xH100", fixed=fixed, space=Space.GENERAL))
        assert narrow is not None
        assert wide is not None
        assert wide.step_s <= narrow.step_s


def test_every_dp_is_matched_by_a_listed_one_that_is_no_worse() -> None:
    asked = request("8x8xH100", batch=96)
    listed = unit_counts(ModelStage.REFERENCE_INFERENCE, asked.workload, 64, Space.GENERAL)
    for dp in range(1, 65):
        share = -(-96 // dp)
        assert any(smaller <= dp and -(-96 // smaller) == share for smaller in listed)


def test_number_of_candidates_does_not_grow_with_the_cluster() -> None:
    counts = [
        len(unit_counts(ModelStage.ACTOR_TRAINING, request(batch=1024).workload, most, Space.GENERAL))
        for most in (1024, 16384)
    ]
    assert counts[0] == counts[1] < 2 * 3 * 1024**0.5


@pytest.mark.parametrize(
    ("model", "cluster", "sizes"),
    [
        ("llama-3.1-8b", "1x8xH100", [1, 2, 4, 8]),
        ("llama-3.1-8b", "1x4xH100", [1, 2, 4]),
        ("qwen2.5-1.5b", "1x8xH100", [1, 2, 4]),  # 12 heads: not 8
        ("qwen2.5-0.5b", "1x8xH100", [1, 2]),  # 14 heads
        ("llama-3.1-8b", "1x6xH100", [1, 2]),  # 3 and 6 do not divide 32 heads
    ],
)
def test_tp_divides_the_heads_and_the_node(model: str, cluster: str, sizes: list[int]) -> None:
    assert tensor_sizes(model_shape(model), ClusterProfile.parse(cluster).pools[0]) == sizes


@pytest.mark.parametrize(
    "fixed",
    [
        "actor.generation.tp=2",
        "tp=4",
        "actor.training.pp=4,actor.training.dp=2",
        "critic.gpus=4",
        "actor.training.recompute=full,actor.training.micro_batch=2",
        "actor.generation.max_resident=16",
        "actor.training.dp=3",
    ],
)
def test_fixed_choices_are_honoured(fixed: str) -> None:
    plan = best_plan(request(fixed=fixed))
    assert plan is not None
    for fix in parse_fixes(fixed):
        for item in plan.assignments:
            if not fix.covers(item.model_stage):
                continue
            held = {
                Choice.TP: item.tp,
                Choice.PP: item.pp,
                Choice.DP: item.dp,
                Choice.GPUS: item.num_gpus,
                Choice.MICRO_BATCH: item.option.micro_batch,
                Choice.RECOMPUTE: item.option.recompute,
                Choice.MAX_RESIDENT: item.option.max_resident,
            }
            assert held[fix.choice] == fix.value


def test_fixed_gpu_kind_is_honoured_and_pools_are_respected() -> None:
    plan = best_plan(request("1x8xH100+2x8xA100-80", fixed="critic.gpu=A100-80"))
    assert plan is not None
    for item in plan.assignments:
        low, high = (0, 8) if item.gpu_kind == "H100" else (8, 24)
        assert all(low <= rank < high for rank in item.ranks)
        if item.model_stage.model == "critic":
            assert item.gpu_kind == "A100-80"


def test_second_gpu_kind_makes_no_plan_worse() -> None:
    alone, mixed = best_plan(request("1x8xH100")), best_plan(request("1x8xH100+1x8xA100-80"))
    assert alone is not None
    assert mixed is not None
    assert mixed.step_s <= alone.step_s
    assert {item.gpu_kind for item in mixed.assignments} == {"H100", "A100-80"}


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ("actor.tp=3", r"tp=3 of actor\.generation.*take one of 1, 2, 4, 8"),
        ("actor.training.pp=64", r"pp=64 of actor\.training.*32 layers"),
        ("actor.dp=32", r"32 GPUs for actor\.generation.*largest pool has 16"),
        ("actor.tp=4,actor.gpus=6", r"6 GPUs for actor\.generation.*multiple of .*4"),
        ("actor.gpu=B200", r"no GPU of kind B200.*H100"),
        ("actor.tp=2,actor.tp=4", r"two fixed values of tp"),
    ],
)
def test_impossible_fixed_choice_is_named(fixed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        candidate_sets(request(fixed=fixed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "choice=value"),
        ("tp=", "choice=value"),
        ("speed=4", "a choice of tp, pp"),
        ("policy.tp=4", "one of actor, critic"),
        ("tp=0", "whole number"),
        ("tp=two", "whole number"),
        ("recompute=some", "none, selective, full"),
    ],
)
def test_unreadable_fixed_choice_says_what_may_stand_there(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_fix(text)


def test_narrower_scope_wins() -> None:
    fixed = parse_fixes("tp=1,actor.tp=2,actor.training.tp=4")
    assert [chosen(fixed, stage, Choice.TP) for stage in ModelStage] == [2, 1, 1, 1, 4, 1]


def test_options_beyond_a_units_share_are_one_candidate() -> None:
    work = request(batch=8).workload
    assert effective(Option(micro_batch=16), ModelStage.REFERENCE_INFERENCE, work, 2).micro_batch == 4
    assert effective(Option(max_resident=64), ModelStage.ACTOR_GENERATION, work, 2).max_resident is None
    item = of(candidate_sets(request(batch=8)), ModelStage.REFERENCE_INFERENCE)
    sizes = np.array([option.micro_batch or 0 for option in item.options])[item.option]
    keys = list(zip(item.tp, item.pp, item.dp, np.minimum(sizes, np.ceil(8 / item.dp)), strict=True))
    assert len(set(keys)) == len(keys)


def test_recompute_is_among_the_options_of_training_alone() -> None:
    for item in candidate_sets(request()):
        ways = {option.recompute for option in item.options}
        assert ways == ({Recompute.NONE, Recompute.FULL} if "training" in item.model_stage else {None})
