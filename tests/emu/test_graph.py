"""The transition graph: what it does, in which order, and what it refuses."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.graph import TransitionGraph, build_graph
from nereus.emu.kinds import serving_kinds
from nereus.emu.layout import Layout, Rank
from nereus.emu.operations import Destroy, Extend, Merge, Operation, Split
from nereus.emu.reshard import plan_reshard
from nereus.emu.topology import Topology
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import InvalidOperation, NoSource
from tests.emu.exchange import Store, built, check, run, stores_of
from tests.emu.random_states import SPEC, kinds_of, models_of, random_pair

SEEDS = st.integers(0, 100_000)
SIZES = st.sampled_from((4, 8, 12))
FEW = settings(max_examples=120, deadline=None)  # a whole graph each: about 3 ms


def unit(model_stage: str, index: int, tp: int, pp: int, *ranks: int) -> Unit:
    return Unit(
        id=UnitId(model_stage, index),
        model=model_stage.partition(".")[0],
        layout=Layout.make(SPEC, tp=tp, pp=pp, ranks=ranks),
        kinds=kinds_of(model_stage),
    )


def state(*units: Unit, num_ranks: int = 8) -> ClusterState:
    return ClusterState.of(units, range(num_ranks))


def placed(of: ClusterState) -> Counter[tuple[str, Layout]]:
    """A state but for the names of its units."""
    return Counter((unit.model_stage, unit.layout) for unit in of.units)


def operations(graph: TransitionGraph) -> list[Operation]:
    return [node.operation for node in graph.nodes if not hasattr(node.operation, "rank_bytes")]


def kinds(graph: TransitionGraph) -> list[str]:
    return [node.kind for node in graph.order]


@FEW
@given(SEEDS, SIZES)
def test_applying_the_operations_to_the_state_gives_the_target(seed: int, num_ranks: int) -> None:
    before, target = random_pair(seed, num_ranks=num_ranks)
    graph = build_graph(before, target)
    assert graph.apply() == graph.after
    assert placed(graph.after) == placed(target)


@FEW
@given(SEEDS, SIZES)
def test_i3_the_graph_has_no_cycle_and_the_units_of_a_wave_are_disjoint(seed: int, num_ranks: int) -> None:
    graph = build_graph(*random_pair(seed, num_ranks=num_ranks))
    assert nx.is_directed_acyclic_graph(graph.digraph)
    wave_of = {node.id: at for at, wave in enumerate(graph.waves) for node in wave}
    assert sorted(wave_of) == sorted(node.id for node in graph.nodes)
    assert all(wave_of[first] < wave_of[then] for first, then in graph.digraph.edges)
    for wave in graph.waves:
        touched = Counter(name for node in wave for name in node.units)
        assert all(count == 1 for count in touched.values())


@FEW
@given(SEEDS, SIZES)
def test_a_chain_splits_then_destroys_then_extends_then_merges(seed: int, num_ranks: int) -> None:
    graph = build_graph(*random_pair(seed, num_ranks=num_ranks))
    phase = {Split: 0, Destroy: 1, Extend: 2, Merge: 3}
    for chain in graph.chains:
        moves = chain.operations
        if isinstance(moves[0], Extend) and isinstance(moves[-1], Destroy):
            assert moves[-1].unit in moves[0].sources  # a last holder outlives its copy
            moves = moves[:-1]
        assert all(phase[type(a)] <= phase[type(b)] for a, b in pairwise(moves))
        ids = [node.id for node in graph.nodes if graph.chains[node.chain] is chain]
        assert all(graph.digraph.has_edge(a, b) for a, b in pairwise(ids))


@FEW
@given(SEEDS)
def test_chains_of_one_model_stage_share_no_unit_but_kept_sources(seed: int) -> None:
    graph = build_graph(*random_pair(seed))
    kept = {unit.id for unit in graph.kept}
    seen: Counter[UnitId] = Counter()
    for chain in graph.chains:
        seen.update({unit.id for unit in (*chain.reads, *chain.ends, *chain.makes)} - kept)
    assert all(count == 1 for count in seen.values())


@FEW
@given(SEEDS)
def test_resource_edges_join_model_stages_where_one_frees_what_the_other_takes(seed: int) -> None:
    graph = build_graph(*random_pair(seed))
    for first, then, reason in graph.edges:
        a, b = graph.chains[first], graph.chains[then]
        assert reason == "resource"
        assert a.model_stage != b.model_stage
        freed = {rank for unit in a.ends for rank in unit.layout.ranks}
        assert freed & {rank for unit in b.makes for rank in unit.layout.ranks}


@FEW
@given(SEEDS)
def test_equal_inputs_give_equal_graphs_with_equal_hashes(seed: int) -> None:
    first, second = (build_graph(*random_pair(seed)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert [node.id for node in first.order] == [node.id for node in second.order]


@settings(max_examples=25, deadline=None)  # reshard plans: about 40 ms each
@given(SEEDS)
def test_plans_of_the_chains_together_move_the_least_that_is_possible(seed: int) -> None:
    before, target = random_pair(seed)
    graph = build_graph(before, target)
    models, topology = models_of(before), Topology.single_node(8)
    for model_stage in {chain.model_stage for chain in graph.chains}:
        mine = [chain for chain in graph.chains if chain.model_stage == model_stage]
        plans = [chain.reshard_plan(models, topology) for chain in mine]
        moved = sum(plan.bytes for plan in plans if plan is not None)
        whole = plan_reshard(
            SPEC,
            before.replicas(model_stage),
            graph.after.replicas(model_stage),
            topology=topology,
            placement="as_given",
        )
        assert moved == whole.lower_bound


@settings(max_examples=25, deadline=None)  # every byte of every chain is moved: about 100 ms each
@given(SEEDS, st.randoms(use_true_random=False))
def test_i4_chains_run_in_any_order_give_the_target_bit_for_bit(seed: int, draw: random.Random) -> None:
    """As in a transaction: every chain reads the old shards, and what it leaves replaces them at the end."""
    before, target = random_pair(seed)
    graph = build_graph(before, target)
    models = models_of(before)
    live = {
        (unit.model_stage, rank): built(SPEC, unit, rank)
        for unit in before.units
        for rank in unit.layout.ranks
    }
    shadows: dict[tuple[str, Rank], Store | None] = {}
    chains = list(graph.chains)
    draw.shuffle(chains)
    for chain in chains:
        ended = {(unit.model_stage, rank) for unit in chain.ends for rank in unit.layout.ranks}
        shadows.update({place: None for place in ended if place not in shadows})
        plan = chain.reshard_plan(models)
        if plan is None:
            continue
        source = chain.reads[0].model_stage
        outcome = run(plan, {rank: live[source, rank] for unit in plan.old for rank in unit.layout.ranks})
        check(plan, outcome)
        shadows |= {(chain.model_stage, r): outcome.stores[r] for unit in plan.new for r in unit.layout.ranks}
    held = {place: store for place, store in (live | shadows).items() if store is not None}
    wanted = {
        (unit.model_stage, rank): built(SPEC, unit, rank)
        for unit in graph.after.units
        for rank in unit.layout.ranks
    }
    assert held.keys() == wanted.keys()
    for place, store in wanted.items():
        assert all(np.array_equal(held[place][key], array) for key, array in store.items())


def test_a_transition_to_itself_is_empty() -> None:
    before, _ = random_pair(3)
    graph = build_graph(before, before)
    assert graph.nodes == ()
    assert graph.after == before


def test_a_kept_unit_keeps_its_name_and_feeds_the_new_one() -> None:
    before = state(unit("actor.training", 4, 2, 1, 0, 1))
    target = state(unit("actor.training", 0, 2, 1, 0, 1), unit("actor.training", 1, 2, 1, 2, 3))
    graph = build_graph(before, target)
    assert operations(graph) == [
        Extend(
            sources=(UnitId("actor.training", 4),),
            into=((UnitId("actor.training", 5), Layout.make(SPEC, tp=2, pp=1, ranks=(2, 3))),),
        )
    ]
    plan = graph.chains[0].reshard_plan(models_of(before))
    assert plan is not None
    assert before.units[0] in plan.new


def test_new_units_take_the_kept_unit_of_their_own_node() -> None:
    before = state(unit("actor.training", 0, 1, 1, 0), unit("actor.training", 1, 1, 1, 4))
    grown = [unit("actor.training", 2 + at, 1, 1, rank) for at, rank in enumerate((5, 6, 1, 2))]
    graph = build_graph(before, state(*before.units, *grown), Topology.uniform(8, 4))
    taken = {chain.reads[0].layout.ranks: {u.layout.ranks for u in chain.makes} for chain in graph.chains}
    assert taken == {(0,): {(1,), (2,)}, (4,): {(5,), (6,)}}


def test_a_unit_that_moves_away_lives_until_its_copy_does() -> None:
    before = state(unit("actor.training", 0, 2, 1, 0, 1))
    graph = build_graph(before, state(unit("actor.training", 0, 2, 1, 2, 3)))
    assert kinds(graph) == ["extend", "destroy"]
    assert graph.apply() == graph.after


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 2, 1, 3)])
def test_units_whose_ranks_one_takes_merge_however_they_lie_on_them(ranks: tuple[Rank, ...]) -> None:
    old = (unit("actor.training", 0, 2, 1, 0, 1), unit("actor.training", 1, 2, 1, 2, 3))
    graph = build_graph(state(*old), state(unit("actor.training", 0, 4, 1, *ranks)))
    into = (UnitId("actor.training", 2), Layout.make(SPEC, tp=4, pp=1, ranks=ranks))
    assert operations(graph) == [Merge(units=(old[0].id, old[1].id), into=into)]


def test_release_comes_before_acquire() -> None:
    before = state(
        unit("actor.generation", 0, 2, 1, 0, 1),
        unit("reference.inference", 0, 2, 1, 2, 3),
        unit("reference.inference", 1, 2, 1, 4, 5),
    )
    target = state(
        unit("actor.generation", 0, 2, 1, 0, 1),
        unit("actor.generation", 1, 2, 1, 2, 3),
        unit("reference.inference", 0, 2, 1, 4, 5),
    )
    graph = build_graph(before, target)
    assert kinds(graph) == ["destroy", "extend"]
    assert [reason for _, _, reason in graph.edges] == ["resource"]


def test_ties_go_to_generation_then_inference_then_training() -> None:
    stages = ("critic.training", "actor.generation", "reference.inference")
    before = state(*(unit(stage, 0, 4, 1, 0, 1, 2, 3) for stage in stages))
    target = state(*(unit(stage, 0, 2, 2, 0, 1, 2, 3) for stage in stages))
    graph = build_graph(before, target)
    order = [graph.chains[node.chain].model_stage for node in graph.order]
    assert order == ["actor.generation", "reference.inference", "critic.training"]


def test_model_stages_on_other_gpus_do_not_wait_for_one_another() -> None:
    before = state(unit("actor.training", 0, 2, 1, 0, 1), unit("critic.training", 0, 2, 1, 2, 3))
    target = state(unit("actor.training", 0, 1, 2, 0, 1), unit("critic.training", 0, 1, 2, 2, 3))
    assert build_graph(before, target).edges == ()


def test_two_trained_models_may_trade_places() -> None:
    before = state(unit("actor.training", 0, 2, 1, 0, 1), unit("critic.training", 0, 2, 1, 2, 3))
    target = state(unit("actor.training", 0, 2, 1, 2, 3), unit("critic.training", 0, 2, 1, 0, 1))
    graph = build_graph(before, target)
    assert len(graph.edges) == 1  # the circle is cut once
    assert graph.apply() == graph.after


def test_a_reader_of_another_stage_precedes_the_end_of_what_it_reads() -> None:
    before = state(unit("actor.training", 0, 4, 1, 0, 1, 2, 3))
    target = state(unit("actor.training", 0, 2, 2, 0, 1, 2, 3), unit("actor.generation", 0, 1, 1, 4))
    graph = build_graph(before, target)
    assert kinds(graph) == ["extend", "merge"]
    assert [reason for _, _, reason in graph.edges] == ["source"]
    assert graph.apply().replicas("actor.generation")[0].kinds == serving_kinds("bf16")
    plan = next(c for c in graph.chains if c.model_stage == "actor.generation").reshard_plan(
        models_of(before)
    )
    assert plan is not None
    assert plan.new == graph.after.replicas("actor.generation")
    check(plan, run(plan, stores_of(plan)))


def test_a_circle_of_edges_is_refused() -> None:
    before = state(unit("actor.training", 0, 2, 1, 0, 1), unit("critic.training", 0, 2, 1, 2, 3))
    target = state(unit("actor.training", 0, 1, 2, 0, 1), unit("critic.training", 0, 1, 2, 2, 3))
    graph = build_graph(before, target)
    with pytest.raises(InvalidOperation, match="I3"):
        graph.with_edges([(0, 1, "resource"), (1, 0, "resource")])


def test_i2_a_target_on_other_ranks_is_refused() -> None:
    before = state(unit("actor.training", 0, 1, 1, 0), num_ranks=4)
    with pytest.raises(InvalidOperation, match="I2"):
        build_graph(before, state(unit("actor.training", 0, 1, 1, 0), num_ranks=5))


def test_a_target_without_a_holder_of_the_optimizer_is_refused() -> None:
    before = state(unit("actor.training", 0, 1, 1, 0), unit("actor.generation", 0, 1, 1, 1))
    with pytest.raises(InvalidOperation, match="nobody would hold exp_avg of actor"):
        build_graph(before, state(unit("actor.generation", 0, 1, 1, 1)))


def test_a_model_that_nobody_holds_has_no_source() -> None:
    before = state(unit("actor.training", 0, 1, 1, 0))
    target = state(unit("actor.training", 0, 1, 1, 0), unit("reference.inference", 0, 1, 1, 1))
    with pytest.raises(NoSource, match=r"reference\.inference"):
        build_graph(before, target)


def test_operations_do_not_change_the_kinds_of_state() -> None:
    before = state(unit("actor.generation", 0, 1, 1, 0))
    other = Unit(
        id=UnitId("actor.generation", 0),
        model="actor",
        layout=Layout.make(SPEC, tp=1, pp=1, ranks=(1,)),
        kinds=serving_kinds("fp32"),
    )
    with pytest.raises(InvalidOperation, match="kinds"):
        build_graph(before, state(other))


def test_predecessors_are_what_a_flow_waits_for() -> None:
    before = state(unit("actor.training", 0, 2, 1, 0, 1))
    target = state(unit("actor.training", 0, 4, 1, 0, 1, 2, 3))
    graph = build_graph(before, target)
    extend, merge = graph.order
    assert (extend.kind, merge.kind) == ("extend", "merge")
    assert (extend.leads, merge.leads) == (True, False)
    assert graph.predecessors(merge.id) == (extend.id,)
    assert graph.node(merge.id) == merge
    with pytest.raises(KeyError):
        graph.node("nobody")
