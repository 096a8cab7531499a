"""Plans know what engines can run: layouts, weights of their own, a cache that is never given back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.emu.decoder import DecoderConfig
from nereus.emu.engine_limits import problem_with
from nereus.emu.serving import Serving, cache_bytes
from nereus.errors import ConfigError
from nereus.planner.candidate_set import candidate_sets, problem_of
from nereus.planner.choose import best_plan
from nereus.planner.fixed import parse_fixes
from nereus.planner.layouts import Space, layouts
from nereus.planner.memory import stage_memory
from nereus.planner.models import model_shape
from nereus.planner.problem import evaluate
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest
from nereus.planner.workload import Algorithm, Engines, ModelShapes, ModelStage
from tests.planner.plan_requests import request

GENERATE, TRAIN = ModelStage.ACTOR_GENERATION, ModelStage.ACTOR_TRAINING
SERVING = Serving(longest_tokens=2560, rows=256, kv_cache_bytes=20 << 30)
VLLM = Engines(generation="vllm", serving=SERVING)


def asked(model: str = "llama-3.1-8b", engines: Engines = VLLM, **options: str) -> PlanRequest:
    """GRPO on 16 H100 unless told otherwise."""
    made = request(model=model, algorithm=Algorithm.GRPO, **options)  # type: ignore[arg-type]
    return replace(made, workload=replace(made.workload, engines=engines), space=Space.GENERAL)


@pytest.mark.parametrize("training", ["torch", "megatron", "deepspeed"])
@pytest.mark.parametrize(
    ("model", "cluster"),
    [("qwen2.5-1.5b", "2x8xH100"), ("llama-3.1-8b", "2x8xH100"), ("qwen2.5-0.5b", "2x6xH100")],
)
def test_every_assignment_of_a_plan_is_one_that_its_engine_runs(
    model: str, training: str, cluster: str
) -> None:
    engines = replace(VLLM, training=training)  # type: ignore[arg-type]
    made = asked(model, engines, cluster=cluster)
    for item in candidate_sets(made):
        engine, shape = engines.of(item.model_stage.stage), made.workload.shape(item.model_stage)
        assert item.cuts
        assert not [cut for cut in item.cuts if problem_with(engine, shape, *cut)]
    plan = best_plan(made)
    assert plan is not None or training == "deepspeed", "tp 2 at most holds no 8B's optimizer"
    for assignment in plan.assignments if plan else ():
        engine = engines.of(assignment.model_stage.stage)
        shape = made.workload.shape(assignment.model_stage)
        assert problem_with(engine, shape, assignment.tp, assignment.pp) is None


def odd(shape: DecoderConfig) -> DecoderConfig:
    """Twelve heads and kv heads: tp 3 and 6 cut them, and 64 rows of vocabulary in no way."""
    return replace(shape, num_heads=12, num_kv_heads=12, intermediate_size=12 * 512)


def test_the_engines_of_a_model_bound_its_stages_apart() -> None:
    shape = odd(model_shape("qwen2.5-1.5b"))
    pool = ClusterProfile.parse("1x6xH100").pools[0]
    work = replace(request().workload, models=ModelShapes.same(shape, Algorithm.PPO))

    def sizes(stage: ModelStage, engines: Engines) -> set[tuple[float, float]]:
        tp, pp, *_ = layouts(stage, replace(work, engines=engines), pool, Space.POW2, ())
        return set(zip(tp.tolist(), pp.tolist(), strict=True))

    assert {tp for tp, _ in sizes(GENERATE, Engines())} == {1, 2, 3, 6}
    assert {tp for tp, _ in sizes(GENERATE, VLLM)} == {1, 2}
    assert {tp for tp, _ in sizes(TRAIN, VLLM)} == {1, 2, 3, 6}
    assert {pp for _, pp in sizes(TRAIN, Engines(training="deepspeed"))} == {1}
    assert {pp for _, pp in sizes(GENERATE, Engines(training="deepspeed"))} > {1}


@pytest.mark.parametrize(
    ("engines", "fixed", "why"),
    [
        (Engines(training="deepspeed"), "actor.training.pp=2", "PipelineModule"),
        (Engines(training="megatron"), "actor.training.tp=4", "whole kv heads"),
        (replace(VLLM, on_cpu=True), "", "head_dim"),
    ],
)
def test_what_an_engine_cannot_run_cannot_be_fixed(engines: Engines, fixed: str, why: str) -> None:
    made = asked("qwen2.5-1.5b", engines)
    small = replace(model_shape("qwen2.5-1.5b"), head_dim=48)
    models = ModelShapes.same(small, Algorithm.GRPO, reward=False)
    made = replace(made, workload=replace(made.workload, models=models), fixed=parse_fixes(fixed))
    with pytest.raises(ConfigError, match=why):
        candidate_sets(made)


def test_an_engine_with_a_cache_of_its_own_keeps_it_and_its_weights_while_others_run() -> None:
    made, plain = asked(), asked(engines=Engines())
    memory, shared = (
        stage_memory(GENERATE, 2, 2, 2, workload=one.workload, cluster=one.cluster, gpu_kind="H100")
        for one in (made, plain)
    )
    cache = cache_bytes(
        made.workload.models.actor, 2, 16, longest_tokens=2560, rows=256, limit_bytes=20 << 30
    )
    assert memory.terms["engine_cache"] == cache == 20 << 30
    assert memory.terms["packed_weights"] == memory.terms["weights"] == shared.terms["weights"]
    assert memory.persistent_bytes == 2 * shared.persistent_bytes + cache + memory.terms["engine_graphs"]


def test_an_engine_with_weights_of_its_own_shares_none_under_any_layout() -> None:
    made = asked()
    sets = {item.model_stage: item for item in candidate_sets(made)}
    assert not np.isin(sets[GENERATE].seat.layout, sets[TRAIN].seat.layout).any()
    plain = {item.model_stage: item for item in candidate_sets(asked(engines=Engines()))}
    assert np.isin(plain[GENERATE].seat.layout, plain[TRAIN].seat.layout).any()
    plan = best_plan(made)
    assert plan is not None
    assert not any(item.shares_weights for item in plan.assignments)
    assert next(item for item in plan.assignments if item.model_stage is GENERATE).publish_s > 0


def test_a_cache_that_leaves_no_room_for_training_is_no_plan() -> None:
    huge = replace(VLLM, serving=replace(SERVING, rows=4096, kv_cache_bytes=50 << 30))
    made = asked(engines=huge, cluster="1x8xH100")
    sets = candidate_sets(made)
    colocated = problem_of(made, sets)
    sizes = {at: int(np.argmin(item.seat.persistent_bytes)) for at, item in enumerate(sets)}
    assert not evaluate(colocated, sizes).feasible
    plan = best_plan(made)
    if plan is None:
        return
    generation = next(item for item in plan.assignments if item.model_stage is GENERATE)
    others = {rank for item in plan.assignments if item is not generation for rank in item.ranks}
    assert others.isdisjoint(generation.ranks), "such a cache needs GPUs of its own"


def test_no_more_sequences_are_counted_at_once_than_the_engine_runs() -> None:
    work = asked().workload
    assert work.most_resident == 256
    assert replace(work, max_resident=64).most_resident == 64
    assert replace(work, engines=Engines()).most_resident is None
