"""Ranks: disjoint within a stage, shared where weights are shared, TP groups inside a node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import InvalidLayout
from nereus.planner.choose import best_plan
from nereus.planner.layouts import Space
from nereus.planner.occupancy import occupancy
from nereus.planner.ranks import Block, PoolSize, place
from nereus.planner.remedy import remedies
from nereus.planner.request import Placement, Turns
from nereus.planner.workload import Schedule, Stage
from tests.planner.plan_requests import request

NODE = 8
SIZES = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))


def check(blocks: list[Block], placed: dict[str, tuple[int, ...]], num_gpus: int) -> None:
    for stage in range(3):
        taken = [rank for block in blocks if stage in block.stages for rank in placed[block.name]]
        assert len(taken) == len(set(taken))
        assert all(0 <= rank < num_gpus for rank in taken)
    for block in blocks:
        ranks = placed[block.name]
        assert len(ranks) == block.num_gpus
        for at in range(0, len(ranks), block.tp):
            group = ranks[at : at + block.tp]
            assert len({rank // NODE for rank in group}) == 1


@settings(max_examples=300)
@given(
    st.lists(SIZES, min_size=6, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 40),
)
def test_whatever_the_counts_allow_can_be_placed(
    sizes: list[tuple[int, int]], own: bool, share_actor: bool, share_critic: bool, spare: int
) -> None:
    (tg, ng), (tc, nc), (tf, nf), (tw, nw), (ta, na), (tk, nk) = sizes

    def block(name: str, tp: int, count: int, *stages: int) -> Block:
        return Block(name=name, tp=tp, num_gpus=tp * count, pool=0, stages=stages)

    share_actor = share_actor and not own
    blocks = [block("reference", tf, nf, 1), block("reward", tw, nw, 1)]
    blocks.append(block("actor", ta, na, 0, 2) if share_actor else block("actor", ta, na, 2))
    if not share_actor:
        blocks.append(block("generation", tg, ng, *((0, 1, 2) if own else (0,))))
    blocks.append(block("critic", tk, nk, 1, 2) if share_critic else block("critic", tk, nk, 2))
    if not share_critic:
        blocks.append(block("critic.inference", tc, nc, 1))
    need = max(sum(b.num_gpus for b in blocks if stage in b.stages) for stage in range(3))
    size = -(-(need + spare) // NODE) * NODE
    check(blocks, place(blocks, [PoolSize(num_gpus=size, gpus_per_node=NODE)]), size)


def test_group_that_cannot_stay_inside_a_node_is_refused() -> None:
    blocks = [
        Block(name="one", tp=3, num_gpus=3, pool=0, stages=(2,)),
        Block(name="two", tp=2, num_gpus=4, pool=0, stages=(2,)),
    ]
    with pytest.raises(InvalidLayout, match="inside one node"):
        place(blocks, [PoolSize(num_gpus=12, gpus_per_node=6)])


@pytest.mark.parametrize("space", list(Space))
@pytest.mark.parametrize("placement", list(Placement))
def test_plan_has_disjoint_ranks_in_each_stage(space: Space, placement: Placement) -> None:
    plan = best_plan(request("2x8xH100", "qwen3-1.7b", space=space, placement=placement))
    assert plan is not None
    for stage in Stage:
        items = [item for item in plan.assignments if item.model_stage.stage is stage]
        taken = [rank for item in items for rank in item.ranks]
        assert set(taken) <= set(range(16))
        assert len(taken) == len(set(taken)) or stage in plan.arrangement.in_turn
    for item in plan.assignments:
        assert len(item.units) == item.dp
        assert all(len(unit) == item.tp * item.pp for unit in item.units)
        if item.shares_weights:
            trainer = plan.of(
                next(
                    s
                    for s in (a.model_stage for a in plan.assignments)
                    if s.model is item.model_stage.model and s.stage is Stage.TRAINING
                )
            )
            assert item.ranks == trainer.ranks
    if placement is Placement.DISAGGREGATED:
        generation = set(plan.assignments[0].ranks)
        assert all(generation.isdisjoint(item.ranks) for item in plan.assignments[1:])


def test_models_that_take_turns_make_a_small_cluster_enough() -> None:
    asked = request("1x2xH100", "qwen3-0.6b")
    assert best_plan(asked) is None  # three models would score side by side
    assert any("turns" in remedy.change for remedy in remedies(asked))
    plan = best_plan(replace(asked, turns=Turns.AUTO))
    assert plan is not None
    assert Stage.INFERENCE in plan.arrangement.in_turn
    scored = [item for item in plan.assignments if item.model_stage.stage is Stage.INFERENCE]
    assert plan.stage_s[Stage.INFERENCE] == pytest.approx(sum(item.cost.latency_s for item in scored))
    for group in occupancy(plan):
        assert group.total_bytes <= group.usable_bytes


def test_more_freedom_to_take_turns_is_never_worse() -> None:
    steps = {
        turns: plan.step_s
        for turns in Turns
        if (plan := best_plan(replace(request("2x8xH100"), turns=turns))) is not None
    }
    assert len(steps) == 3
    assert steps[Turns.AUTO] == min(steps.values())


@pytest.mark.parametrize("schedule", [Schedule.ONE_STEP_OFF, Schedule.ASYNC])
def test_overlapping_schedule_takes_the_longer_side(schedule: Schedule) -> None:
    plan = best_plan(request("4x8xH100", schedule=schedule))
    assert plan is not None
    assert plan.arrangement.placement is Placement.DISAGGREGATED
    generation, *rest = plan.stage_s.values()
    assert plan.step_s == pytest.approx(max(generation, sum(rest)) + plan.publish_s)
    assert plan.publish_s > 0
