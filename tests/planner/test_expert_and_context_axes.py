"""Experts and long contexts in the search: what ep and cp buy and cost, and that the search stays exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from nereus.emu.decoder import decoder_spec
from nereus.emu.layout import Layout, shard
from nereus.emu.tensor import box_size
from nereus.errors import ConfigError
from nereus.planner.candidate_set import candidate_sets, problem_of
from nereus.planner.choose import Priced, best_plan
from nereus.planner.collective_time import all_to_all_s
from nereus.planner.cost import stage_time
from nereus.planner.explain import families
from nereus.planner.fixed import avoided, parse_fixes
from nereus.planner.held import sizes_of, with_layouts
from nereus.planner.layouts import RING_TOKENS, Space, layouts
from nereus.planner.lengths import LengthDistribution
from nereus.planner.memory import stage_memory, usable_bytes
from nereus.planner.models import builtin_parameters, model_shape
from nereus.planner.problem import evaluate
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import PlanRequest, StageOptions
from nereus.planner.shard_size import rank_parameters
from nereus.planner.workload import Algorithm, Engines, ModelShapes, ModelStage, Recompute, Workload

TRAIN, GENERATE = ModelStage.ACTOR_TRAINING, ModelStage.ACTOR_GENERATION
MIXTURES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b-v0.1")


def request(
    model: str, cluster: str, *, prompt: int = 512, longest: float = 2048, batch: int = 64, fixed: str = ""
) -> PlanRequest:
    """GRPO with a rule for a reward: generation, reference, training."""
    shape = model_shape(model)
    return PlanRequest(
        workload=Workload(
            algorithm=Algorithm.GRPO,
            models=ModelShapes.same(shape, Algorithm.GRPO, reward=False),
            num_prompts=batch,
            prompt_tokens=prompt,
            response=LengthDistribution.from_mean_p95_max(longest / 4, longest / 2, longest),
        ),
        cluster=ClusterProfile.parse(cluster),
        fixed=parse_fixes(fixed),
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_their_published_number_of_weights(name: str) -> None:
    full = next(
        key
        for key in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "mistralai/Mixtral-8x7B-v0.1")
        if key.lower().endswith(name)
    )
    assert model_shape(name).num_parameters == builtin_parameters(full)


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 1, 4), (4, 3, 8), (1, 5, 16)])
def test_weights_of_a_rank_are_those_that_the_layout_lists(tp: int, pp: int, ep: int) -> None:
    shape = replace(model_shape("qwen3-30b-a3b"), num_layers=6)
    layout = Layout.make(decoder_spec(shape), tp=tp, pp=pp, ep=ep, ranks=tuple(range(tp * pp * ep)))
    most = max(
        sum(box_size(piece.box) for piece in shard(decoder_spec(shape), layout, rank).pieces)
        for rank in layout.ranks
    )
    assert float(rank_parameters(shape, tp, pp, ep)) == pytest.approx(most, rel=1e-5)  # a norm


def test_dense_short_jobs_see_the_layouts_that_they_saw_before() -> None:
    asked = request("llama-3.1-8b", "2x8xH100")
    for item in candidate_sets(asked):
        assert (item.ep == 1).all()
        assert (item.cp == 1).all()


def test_ep_divides_the_experts_and_cp_leaves_every_rank_a_long_part() -> None:
    asked = request("qwen3-30b-a3b", "8x8xH100", longest=4 * RING_TOKENS)
    pool = asked.cluster.pools[0]
    _, _, _, ep, cp = layouts(TRAIN, asked.workload, pool, Space.POW2, ())
    assert set(ep.tolist()) == {1, 2, 4, 8, 16, 32, 64}
    assert set(cp.tolist()) == {1, 2, 4}
    assert set(layouts(GENERATE, asked.workload, pool, Space.POW2, ())[4].tolist()) == {1}
    dense = request("llama-3.1-8b", "8x8xH100", longest=4 * RING_TOKENS).workload
    closed = replace(dense, engines=Engines(training="megatron"))
    assert set(layouts(TRAIN, dense, pool, Space.POW2, ())[4].tolist()) == {1, 2, 4}
    assert set(layouts(TRAIN, closed, pool, Space.POW2, ())[4].tolist()) == {1}


def test_a_256k_context_trains_with_cp_where_it_does_not_without() -> None:
    asked = request("llama-3.1-8b", "8x8xH100", prompt=8192, longest=256 * 1024 - 8192, batch=32)
    one = request(
        "llama-3.1-8b",
        "8x8xH100",
        prompt=8192,
        longest=256 * 1024 - 8192,
        batch=32,
        fixed="actor.training.cp=1,reference.inference.cp=1",
    )
    plan, without = best_plan(asked), best_plan(one)
    assert plan is not None
    assert plan.of(TRAIN).cp > 1
    assert plan.of(GENERATE).cp == 1
    assert without is None or without.step_s > plan.step_s


def test_a_mixture_that_fits_no_gpu_whole_is_cut_along_ep_where_tp_is_taken() -> None:
    plan = best_plan(request("qwen3-30b-a3b", "4x8xH100"))
    assert plan is not None
    dense = best_plan(request("qwen3-30b-a3b", "4x8xH100", fixed="ep=1"))
    assert plan.of(TRAIN).ep > 1
    assert dense is None or plan.step_s < dense.step_s


def test_memory_falls_with_both_axes_and_dense_weights_only_with_tp() -> None:
    asked = request("qwen3-30b-a3b", "8x8xH100", longest=65536)
    work = replace(asked.workload, recompute=Recompute.FULL, micro_batch=8)

    def memory(ep: int, cp: int) -> dict[str, int]:
        found = stage_memory(TRAIN, 1, 1, 1, ep, cp, workload=work, cluster=asked.cluster, gpu_kind="H100")
        return dict(found.terms)

    one, experts, ring = memory(1, 1), memory(8, 1), memory(1, 4)
    shape = asked.workload.models.actor
    dense = float(rank_parameters(replace(shape, intermediate_size=0), 1, 1))
    assert experts["weights"] == pytest.approx(2 * (dense + (one["weights"] / 2 - dense) / 8), rel=1e-6)
    assert ring["weights"] == one["weights"]
    assert experts["activations"] == pytest.approx(one["activations"] / 8, rel=0.01)  # eight rows, one a rank
    assert ring["activations"] < one["activations"] / 3  # and what goes round


def test_compute_is_shared_out_and_communication_is_paid_for() -> None:
    asked = request("qwen3-30b-a3b", "8x8xH100", longest=65536)
    work = replace(asked.workload, micro_batch=8)

    def terms(ep: int, cp: int) -> dict[str, float]:
        found = stage_time(TRAIN, 1, 1, 8, ep, cp, workload=work, cluster=asked.cluster, gpu_kind="H100")
        return dict(found.terms)

    one, experts, ring = terms(1, 1), terms(8, 1), terms(1, 4)
    assert one["expert_parallel"] == one["context_parallel"] == 0
    assert experts["expert_parallel"] > 0
    assert experts["gemm"] < one["gemm"] / 4
    assert ring["attention"] == pytest.approx(one["attention"] / 4)
    # A ring inside a node is hidden by long attention; one of short rows is not.
    assert ring["context_parallel"] == 0
    brief = replace(work, response=LengthDistribution.constant(64), prompt_tokens=64)
    found = stage_time(TRAIN, 1, 1, 1, 1, 8, workload=brief, cluster=asked.cluster, gpu_kind="H100")
    assert found.terms["context_parallel"] > 0


def test_an_all_to_all_is_one_exchange_inside_the_node_and_one_across() -> None:
    cluster = ClusterProfile.parse("2x8xH100")
    size = 8 * 1e9
    up, out = all_to_all_s(cluster, "H100", size, 8, 1)
    link = cluster.pools[0].scale_up
    assert float(out) == 0
    assert float(up) == pytest.approx(7e9 / (link.bandwidth_Bps * link.efficiency), rel=1e-3)
    _, out = all_to_all_s(cluster, "H100", size, 16, 1)
    wire = cluster.scale_out
    assert float(out) == pytest.approx(4e9 / (wire.bandwidth_Bps * wire.efficiency), rel=1e-3)
    assert [float(x) for x in all_to_all_s(cluster, "H100", size, 1, 1)] == [0, 0]


def test_generation_along_ep_divides_experts_and_keeps_all_rows() -> None:
    asked = request("qwen3-30b-a3b", "8x8xH100")
    sizes = {"workload": asked.workload, "cluster": asked.cluster, "gpu_kind": "H100"}
    one, two = (stage_memory(GENERATE, 1, 1, 1, ep, **sizes).terms for ep in (1, 2))
    assert two["kv_cache"] == one["kv_cache"]
    assert two["weights"] < 0.6 * one["weights"]
    first, second = (stage_time(GENERATE, 1, 1, 1, ep, **sizes).terms for ep in (1, 2))
    assert second["attention"] == pytest.approx(first["attention"])
    assert second["weights"] < first["weights"]
    assert second["expert_parallel"] > 0


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_the_search_equals_enumeration_over_all_axes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = replace(model_shape("mixtral-8x7b-v0.1"), num_layers=4)
    asked = request("mixtral-8x7b-v0.1", "1x4xH100", longest=int(rng.choice([2048, 49152])), batch=8)
    models = ModelShapes(actor=shape) if seed % 2 else ModelShapes.same(shape, Algorithm.GRPO, reward=False)
    asked = replace(
        asked,
        workload=replace(asked.workload, models=models, num_samples=int(rng.integers(1, 4))),
        options=StageOptions(
            train_micro_batches=(2,),
            score_micro_batches=(2,),
            recomputes=(Recompute.FULL,),
            max_residents=(None,),
        ),
    )
    sets = candidate_sets(asked)
    assert {int(size) for item in sets for size in item.ep} > {1}
    best = np.inf
    for arrangement in asked.arrangements:
        problem = problem_of(asked, sets, arrangement)
        for picks in product(*(range(len(item.seat)) for item in sets)):
            value = evaluate(problem, dict(enumerate(picks)))
            if value.feasible:
                best = min(best, value.step_s)
    plan = best_plan(asked)
    assert plan is not None
    assert plan.step_s == pytest.approx(best, rel=1e-9)


def test_a_held_plan_keeps_its_axes_and_families_tell_them_apart() -> None:
    asked = request("qwen3-30b-a3b", "4x8xH100")
    plan = best_plan(asked)
    assert plan is not None
    again = with_layouts(asked, sizes_of(plan))
    assert again is not None
    assert sizes_of(again) == sizes_of(plan)
    found = families(Priced.of(asked), plan, (TRAIN,))
    chosen = plan.of(TRAIN)
    cuts = {(item.tp, item.pp, item.ep, item.cp) for item in found}
    assert (chosen.tp, chosen.pp, chosen.ep, chosen.cp) not in cuts
    assert {ep for _, _, ep, _ in cuts} >= {1, 2, 4, 8}


def test_axes_are_fixed_and_left_out_by_name() -> None:
    asked = request("qwen3-30b-a3b", "4x8xH100", fixed="actor.training.ep=4,reference.ep=2")
    plan = best_plan(asked)
    assert plan is not None
    assert plan.of(TRAIN).ep == 4
    assert plan.of(ModelStage.REFERENCE_INFERENCE).ep == 2
    assert plan.of(TRAIN).num_gpus == plan.of(TRAIN).unit_size * plan.of(TRAIN).dp
    assert "ep4" in plan.of(TRAIN).text
    assert plan.to_campaign()["actor_training"]["ep"] == 4
    assert avoided(parse_fixes("avoid=tp4pp2,avoid=tp1pp1ep8cp2"), TRAIN) == {(4, 2, 1, 1), (1, 1, 8, 2)}


@pytest.mark.parametrize(
    ("model", "fixed", "message"),
    [
        ("llama-3.1-8b", "ep=2", "no experts"),
        ("mixtral-8x7b-v0.1", "ep=3", "8 experts"),
        ("llama-3.1-8b", "actor.generation.cp=2", "divide a sequence"),
    ],
)
def test_axes_that_a_model_or_stage_lacks_are_refused(model: str, fixed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        best_plan(request(model, "2x8xH100", fixed=fixed))


def test_usable_memory_is_what_a_256k_rank_would_exceed_alone() -> None:
    """The 8B at 256K tokens on one rank: even full recomputation keeps more than a GPU has."""
    asked = request("llama-3.1-8b", "8x8xH100", prompt=8192, longest=256 * 1024 - 8192, batch=32)
    work = replace(asked.workload, recompute=Recompute.FULL)
    sizes = {"workload": work, "cluster": asked.cluster, "gpu_kind": "H100"}
    assert stage_memory(TRAIN, 2, 1, 1, **sizes).total_bytes > usable_bytes(asked.cluster, "H100")
    assert stage_memory(TRAIN, 8, 1, 1, 1, 8, **sizes).total_bytes < usable_bytes(asked.cluster, "H100")
