"""Memory: the bytes that arithmetic gives, the stage that is fullest, and the term that breaks the limit."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.layout import Layout, shard
from nereus.emu.lora import TARGETS, Lora, trained_part
from nereus.planner.candidate_set import candidate_sets
from nereus.planner.lengths import LengthDistribution
from nereus.planner.memory import (
    StageMemory,
    co_resident,
    rank_memories,
    stage_memories,
    stage_memory,
    transition_peak,
    usable_bytes,
)
from nereus.planner.models import builtin_models, builtin_parameters, model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest
from nereus.planner.shard_size import rank_parameters, total_parameters, trained_parameters
from nereus.planner.stage_bytes import resident_tokens
from nereus.planner.workload import (
    Algorithm,
    Attention,
    ModelShapes,
    ModelStage,
    Pipeline,
    Recompute,
    Workload,
)

CLUSTER = ClusterProfile.parse("2x8xH100")
SHAPE = model_shape("llama-3.1-8b")
WORKLOAD = Workload(
    algorithm=Algorithm.PPO,
    models=ModelShapes.same(SHAPE, Algorithm.PPO),
    num_prompts=512,
    prompt_tokens=512,
    response=LengthDistribution.from_mean_p95_max(1024, 1900, 2048),
)
TRAIN = ModelStage.ACTOR_TRAINING


def memory(
    stage: ModelStage, tp: int, pp: int, dp: int, workload: Workload = WORKLOAD, gpu_kind: str = "H100"
) -> StageMemory:
    return stage_memory(stage, tp, pp, dp, workload=workload, cluster=CLUSTER, gpu_kind=gpu_kind)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 3]),
    rank=st.integers(1, 64),
    targets=st.sets(st.sampled_from(TARGETS), min_size=1),
)
@settings(max_examples=30, deadline=None)
def test_what_is_trained_of_a_model_with_adapters_is_what_its_shards_hold(
    tp: int, pp: int, rank: int, targets: set[str]
) -> None:
    lora = Lora(rank=rank, alpha=rank, targets=tuple(sorted(targets)))
    shape = replace(SHAPE, num_layers=6, vocab_size=128, num_kv_heads=4, lora=lora)
    model = trained_part(decoder_spec(shape))
    layout = Layout.make(model, tp=tp, pp=pp, ranks=tuple(range(tp * pp)))
    held = [sum(prod(tensor.shape) for tensor in shard(model, layout, at).tensors) for at in layout.ranks]
    one = np.full(1, float(tp))
    assert max(held) == trained_parameters(shape, one, layout.layers[0], True, pp == 1)[0]


def test_adapters_leave_the_frozen_weights_two_bytes_a_parameter_and_are_trained_in_sixteen() -> None:
    shape = SHAPE.with_lora(Lora(rank=16, alpha=32))
    adapted = replace(WORKLOAD, models=ModelShapes.same(shape, Algorithm.PPO))
    whole, thin = (memory(TRAIN, 1, 1, 8, workload) for workload in (WORKLOAD, adapted))
    adapters = trained_part(decoder_spec(shape)).num_elements
    assert adapters == 41_943_040  # 32 layers x 16 x (8 h + 2 d_kv + 3 f), of an 8-billion model
    assert thin.terms["weights"] == whole.terms["weights"] + 2 * adapters
    assert (thin.terms["gradients"], thin.terms["master"]) == (4 * adapters, 4 * adapters)
    assert thin.terms["moments"] == 8 * adapters
    assert whole.persistent_bytes / thin.persistent_bytes > 8


def test_generation_holds_weights_of_its_own_where_adapters_are_trained() -> None:
    shapes = [SHAPE, SHAPE.with_lora(Lora(rank=16, alpha=32))]
    cluster = ClusterProfile.parse("1x8xH200")
    for shape in shapes:
        workload = replace(WORKLOAD, algorithm=Algorithm.GRPO, models=ModelShapes(actor=shape))
        request = PlanRequest(workload=workload, cluster=cluster)
        sets = {item.model_stage: item.seat.layout for item in candidate_sets(request)}
        common = set(sets[ModelStage.ACTOR_GENERATION].tolist()) & set(sets[TRAIN].tolist())
        assert bool(common) == (shape.lora is None)


@pytest.mark.parametrize("name", builtin_models())
def test_weights_of_the_whole_model_are_all_its_parameters(name: str) -> None:
    assert total_parameters(model_shape(name)) == builtin_parameters(name)


@given(
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    pp=st.integers(1, 6),
    tied=st.booleans(),
    bias=st.booleans(),
    head=st.sampled_from(["lm", "value"]),
)
@settings(max_examples=60, deadline=None)
def test_fullest_rank_holds_what_the_layout_gives_it(
    tp: int, pp: int, tied: bool, bias: bool, head: str
) -> None:
    """The closed form against the engine's own shards, padding included."""
    shape = DecoderConfig(
        vocab_size=97,
        hidden_size=64,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        intermediate_size=96,
        tied=tied,
        qkv_bias=bias,
    )
    shape = shape.with_head("value") if head == "value" else shape
    spec = decoder_spec(shape)
    layout = Layout.make(spec, tp=tp, pp=pp, ranks=tuple(range(tp * pp)))
    stored = [
        sum(int(np.prod(tensor.shape)) for tensor in shard(spec, layout, rank).tensors)
        for rank in range(tp * pp)
    ]
    closed = float(rank_parameters(shape, tp, pp))
    # A tied embedding is stored on the last stage too; norms of one hidden size are counted once too often.
    assert max(stored) <= closed * 1.001 + 97 * 64
    assert closed <= max(stored) + 3 * 64 + 97


def test_training_state_takes_eighteen_bytes_a_parameter() -> None:
    parameters = float(rank_parameters(SHAPE, 2, 1))
    assert memory(TRAIN, 2, 1, 4).persistent_bytes == pytest.approx(18 * parameters, rel=1e-4)
    small = replace(WORKLOAD, grad_bytes=2)
    assert memory(TRAIN, 2, 1, 4, small).persistent_bytes == pytest.approx(16 * parameters, rel=1e-4)


def test_logits_count_in_full_where_they_are_not_chunked() -> None:
    whole = memory(TRAIN, 1, 1, 8, replace(WORKLOAD, logits_chunk_tokens=None, micro_batch=4))
    assert whole.terms["logits"] == 3 * 4 * 4 * 2560 * SHAPE.vocab_size
    chunked = memory(TRAIN, 1, 1, 8, replace(WORKLOAD, logits_chunk_tokens=512, micro_batch=4))
    assert chunked.terms["logits"] == 3 * 4 * 512 * SHAPE.vocab_size
    assert memory(ModelStage.CRITIC_TRAINING, 1, 1, 8).terms["logits"] == 0


def test_cache_of_a_token_is_the_published_size() -> None:
    constant = WORKLOAD.with_response(LengthDistribution.constant(1000))
    held = memory(ModelStage.ACTOR_GENERATION, 1, 1, 512, constant).terms["kv_cache"]
    # One sequence of 512 + 1000 tokens at 131,072 bytes a token.
    assert held == pytest.approx(1512 * 131072, rel=0.005)


def test_cache_stays_whole_when_tp_exceeds_the_kv_heads() -> None:
    many, more = (memory(ModelStage.ACTOR_GENERATION, tp, 1, 1).terms["kv_cache"] for tp in (8, 16))
    assert many == more


@given(st.integers(1, 4000))
def test_residency_lies_between_the_mean_and_everybody_at_full_length(count: int) -> None:
    tokens = float(resident_tokens(WORKLOAD, count))
    assert tokens <= count * (512 + 2048) + 1e-6
    assert tokens >= count * (512 + 0.5 * 1024)


def test_residency_covers_ninety_nine_of_a_hundred_batches() -> None:
    response = WORKLOAD.response
    cumulative = np.concatenate(([0.0], np.cumsum(response.shares)))
    generator = np.random.default_rng(0)
    peaks = []
    for _ in range(300):
        lengths = np.interp(generator.uniform(size=64), cumulative, response.edges_tokens)
        steps = np.arange(0, 2049, 16)
        peaks.append(((lengths[:, None] > steps) * (512 + steps)).sum(0).max())
    assert np.mean(np.array(peaks) <= float(resident_tokens(WORKLOAD, 64))) >= 0.99


def test_recompute_and_score_matrices_change_the_activations() -> None:
    kept = {
        choice: memory(TRAIN, 1, 1, 8, WORKLOAD.with_options(recompute=choice)).terms["activations"]
        for choice in Recompute
    }
    assert kept[Recompute.FULL] < kept[Recompute.SELECTIVE] / 8
    eager = replace(WORKLOAD, attention=Attention.EAGER).with_options(recompute=Recompute.NONE)
    scores = memory(TRAIN, 1, 1, 8, eager).terms["activations"] - kept[Recompute.NONE]
    assert scores == pytest.approx(32 * 5 * 32 * 2560**2, rel=1e-6)


def test_longer_responses_and_larger_micro_batches_need_more() -> None:
    long = WORKLOAD.with_response(LengthDistribution.from_mean_p95_max(4096, 7600, 8192))
    for stage in WORKLOAD.model_stages:
        assert memory(stage, 2, 1, 4, long).transient_bytes > memory(stage, 2, 1, 4).transient_bytes
    assert (
        memory(TRAIN, 2, 1, 4, replace(WORKLOAD, micro_batch=4)).transient_bytes
        > memory(TRAIN, 2, 1, 4).transient_bytes
    )


def test_first_stage_of_a_deep_pipeline_is_the_fullest() -> None:
    none = WORKLOAD.with_options(recompute=Recompute.NONE)
    shallow, deep = memory(TRAIN, 1, 2, 1, none), memory(TRAIN, 1, 8, 1, none)
    # Half the layers with 2 micro-batches in flight, an eighth with 8: the same activations.
    assert deep.terms["activations"] == pytest.approx(shallow.terms["activations"], rel=0.01)
    assert deep.persistent_bytes < 0.4 * shallow.persistent_bytes


@pytest.mark.parametrize("stage", list(ModelStage))
def test_arrays_give_what_scalars_give(stage: ModelStage) -> None:
    sizes = ([1, 2, 8, 3], [1, 4, 2, 5], [1, 2, 1, 7])
    many = stage_memories(stage, *sizes, workload=WORKLOAD, cluster=CLUSTER, gpu_kind="H100")
    for index, (tp, pp, dp) in enumerate(zip(*sizes, strict=True)):
        one = memory(stage, tp, pp, dp)
        assert many.at(index) == one
        assert sum(one.terms.values()) == one.total_bytes


def test_verdict_names_the_term_that_breaks_the_limit() -> None:
    usable = usable_bytes(CLUSTER, "H100")
    assert usable == int(80e9 * 0.9)
    train = memory(TRAIN, 1, 1, 8)
    verdict = co_resident({TRAIN: train}, usable)
    assert not verdict.fits
    assert verdict.breaks == "actor.training moments"
    assert co_resident({TRAIN: memory(TRAIN, 8, 1, 1)}, usable).breaks is None
    crowd = memory(ModelStage.ACTOR_GENERATION, 8, 1, 1, replace(WORKLOAD, num_prompts=20_000))
    assert co_resident({ModelStage.ACTOR_GENERATION: crowd}, usable).breaks == "actor.generation kv_cache"


def test_only_one_transient_part_counts_at_a_time() -> None:
    parts = {stage: memory(stage, 8, 1, 2) for stage in WORKLOAD.model_stages}
    verdict = co_resident(parts, usable_bytes(CLUSTER, "H100"))
    persistent = sum(part.persistent_bytes for part in parts.values())
    assert verdict.needed_bytes == persistent + max(part.transient_bytes for part in parts.values())


def test_bounded_transition_needs_one_chunk_more_than_the_larger_shard() -> None:
    assert transition_peak(10, 6) == 16
    assert transition_peak(10, 6, chunk_bytes=1) == 11


def test_gpipe_keeps_every_micro_batch() -> None:
    none = WORKLOAD.with_options(recompute=Recompute.NONE)
    sizes = {"tp": 1, "pp": 2, "dp": 64}  # eight sequences a unit, one a micro-batch
    one_f_one_b = stage_memory(TRAIN, **sizes, workload=none, cluster=CLUSTER, gpu_kind="H100")
    gpipe = stage_memory(
        TRAIN, **sizes, workload=replace(none, pipeline=Pipeline.GPIPE), cluster=CLUSTER, gpu_kind="H100"
    )
    assert gpipe.terms["activations"] == pytest.approx(4 * one_f_one_b.terms["activations"], rel=0.01)


@pytest.mark.parametrize("stage", list(ModelStage))
@pytest.mark.parametrize("pp", [1, 3, 5, 8])
def test_fullest_rank_is_what_the_plan_is_judged_by(stage: ModelStage, pp: int) -> None:
    ranks = rank_memories(stage, 2, pp, 2, workload=WORKLOAD)
    judged = memory(stage, 2, pp, 2)
    fullest = max(rank.total_bytes for rank in ranks)
    assert len(ranks) == pp
    # The plan adds the largest of each term, which may sit on different stages (weights first, logits last).
    assert fullest <= judged.total_bytes * 1.001
    assert judged.total_bytes <= fullest + judged.terms["logits"] + 2 * 128256 * 4096
