"""Schedules: complete, within memory whatever the operations take, near the optimum, quick to make."""

from __future__ import annotations

import time
from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.large_transitions import LONGER, START, large_models, large_state
from benchmarks.transition_events import local_orders_complete, play
from benchmarks.transition_trials import Trial, trial
from nereus.emu.chain_time import estimated, planned
from nereus.emu.graph import build_graph
from nereus.emu.layout import shard
from nereus.emu.schedule import Schedule, schedule
from nereus.emu.schedule_problem import Room, problem_of
from nereus.emu.shard_bytes import bytes_of, sizes_of
from nereus.emu.target import place_target
from nereus.emu.topology import Topology
from nereus.emu.transition_svg import svg
from nereus.emu.transition_text import explain
from nereus.errors import Infeasible
from tests.emu.random_states import SPEC, models_of, random_pair

SEEDS = st.integers(0, 100_000)
SLACKS = st.sampled_from((0.0, 0.25, 0.5, 1.0, 1.5, 2.0))
AMPLE = Room(cap_bytes=1 << 60)


def scheduled(of: Trial) -> Schedule:
    return schedule(of.graph, of.sizes, of.room, of.topology, of.seconds)


@settings(max_examples=60, deadline=None)  # reshard plans of new shapes: up to 100 ms each
@given(SEEDS, SLACKS, st.sampled_from((4, 8, 12)), st.integers(0, 99))
def test_i13_every_transition_completes(seed: int, slack: float, num_ranks: int, noise_seed: int) -> None:
    tight = trial(seed, num_ranks=max(8, num_ranks), slack=slack)
    found = scheduled(tight)
    for noise in (0.0, 1.0):
        assert play(tight, found, noise=noise, seed=noise_seed).complete


@settings(max_examples=60, deadline=None)
@given(SEEDS, SLACKS, st.integers(0, 99))
def test_i14_the_graph_alone_keeps_every_rank_within_its_memory(
    seed: int, slack: float, noise_seed: int
) -> None:
    tight = trial(seed, slack=slack)
    found = scheduled(tight)
    for noise in (0.0, 3.0):  # operations take up to four times as long, or a quarter
        played = play(tight, found, noise=noise, seed=noise_seed, links=False)
        assert played.complete
        assert played.most_over_bytes <= 0
    assert all(peak <= tight.room.cap_by_rank[rank] for rank, peak in found.peak_bytes.items())


@settings(max_examples=30, deadline=None)
@given(SEEDS, SLACKS)
def test_every_rank_takes_its_chains_in_the_one_order(seed: int, slack: float) -> None:
    found = scheduled(trial(seed, slack=slack))
    place = {name: at for at, name in enumerate(found.order)}
    assert sorted(place) == sorted(chain.id for chain in found.graph.chains)
    for rank in found.graph.before.ranks:
        mine = [place[name] for name in found.of_rank(rank)]
        assert mine == sorted(mine)
    for first, then, _ in found.graph.edges:
        assert place[found.graph.chains[first].id] < place[found.graph.chains[then].id]


@settings(max_examples=30, deadline=None)
@given(SEEDS, SLACKS)
def test_a_schedule_still_leads_to_the_target(seed: int, slack: float) -> None:
    tight = trial(seed, slack=slack)
    found = scheduled(tight)
    assert found.graph.apply() == tight.graph.after


def test_with_ample_memory_nothing_waits_and_nothing_goes_to_the_host() -> None:
    for seed in range(20):
        before, target = random_pair(seed)
        graph = build_graph(before, target)
        found = schedule(graph, sizes_of(models_of(before)), AMPLE, Topology.single_node(8))
        assert [edge for edge in found.graph.edges if edge[2] == "resource"] == []
        assert found.tight == frozenset()
        assert found.spilled_bytes == 0


def test_equal_inputs_give_equal_schedules() -> None:
    first, second = (scheduled(trial(11, slack=0.5)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.slots


def test_a_target_beyond_the_memory_of_a_rank_is_infeasible() -> None:
    before, target = random_pair(5)
    with pytest.raises(Infeasible, match="free"):
        schedule(
            build_graph(before, target),
            sizes_of(models_of(before)),
            Room(cap_bytes=10),
            Topology.single_node(8),
        )


def test_spills_beyond_the_memory_of_a_host_are_infeasible() -> None:
    tight = next(t for t in (trial(seed, slack=0.0) for seed in range(20)) if scheduled(t).spilled_bytes)
    room = Room(cap_bytes=0, cap_by_rank=tight.room.cap_by_rank, host_bytes_per_node=1)
    with pytest.raises(Infeasible, match="host"):
        schedule(tight.graph, tight.sizes, room, tight.topology, tight.seconds)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_sizes_equal_what_the_shards_list(seed: int) -> None:
    before, _ = random_pair(seed)
    sizes = sizes_of(models_of(before))
    for unit in before.units:
        listed = [
            sum(prod(tensor.shape) for tensor in shard(SPEC, unit.layout, rank).tensors)
            for rank in unit.layout.ranks
        ]
        assert sizes(unit) == tuple(count * unit.bytes_per_element for count in listed)


def test_planned_seconds_are_those_of_the_chain_s_own_plan() -> None:
    topology = Topology.uniform(8, 4)
    for seed in range(12):
        before, target = random_pair(seed)
        models = models_of(before)
        exact = planned(models, topology)
        for chain in build_graph(before, target, topology).chains:
            plan = chain.reshard_plan(models, topology)
            assert exact(chain) == pytest.approx(plan.seconds() if plan else 0.0, rel=1e-12)


def test_estimated_seconds_are_those_of_the_largest_new_shard_over_the_slowest_link() -> None:
    topology = Topology.uniform(8, 4)
    for seed in range(40):
        before, target = random_pair(seed)
        sizes = sizes_of(models_of(before))
        graph = build_graph(before, target, topology)
        expected = []
        for chain in graph.chains:
            nodes = {topology.node_of(rank) for unit in (*chain.makes, *chain.reads) for rank in unit.ranks}
            link = topology.node if len(nodes) == 1 else topology.network
            most = max((amount for unit in chain.makes for amount in sizes(unit)), default=None)
            expected.append(0.0 if most is None else most / link.bytes_per_s + link.latency_s)
        estimate = estimated(sizes, topology)
        made = bytes_of([unit for chain in graph.chains for unit in chain.makes], sizes)
        assert [estimate(chain) for chain in graph.chains] == expected
        assert estimate.of_all(len(expected), graph.footprint, made) == expected


def test_placing_the_target_moves_no_more_bytes() -> None:
    topology = Topology.uniform(8, 4)
    moved: Counter[str] = Counter()
    for seed in range(20):
        before, target = random_pair(seed)
        models = models_of(before)
        for name, chosen in (("given", target), ("placed", place_target(before, target, models, topology))):
            graph = build_graph(before, chosen, topology)
            plans = [chain.reshard_plan(models, topology) for chain in graph.chains]
            moved[name] += sum(plan.bytes for plan in plans if plan is not None)
    assert moved["placed"] < moved["given"]


def test_local_orders_deadlock_where_the_schedule_completes() -> None:
    trials = [trial(seed, slack=1.0) for seed in range(30)]
    assert all(play(each, scheduled(each)).complete for each in trials)
    dead = sum(not local_orders_complete(each, seed) for seed, each in enumerate(trials))
    assert dead > len(trials) // 2


@pytest.mark.parametrize("slack", [0.0, 0.5, 1.0, 2.0])
def test_makespan_is_near_the_optimum_and_spills_are_needed(slack: float) -> None:
    pytest.importorskip("ortools")
    from benchmarks.transition_schedule import run_trial

    outcomes = [run_trial(seed, slack, num_ranks=16, limit_s=5.0) for seed in range(12)]
    assert all(outcome.complete and outcome.over_bytes <= 0 for outcome in outcomes)
    assert not any(outcome.unneeded_spill for outcome in outcomes)
    gaps = [outcome.gap for outcome in outcomes if outcome.gap is not None]
    assert sum(gaps) / len(gaps) <= (0.05 if slack >= 2 else 0.15)


@pytest.mark.slow
def test_three_hundred_overlapped_trials_complete_near_the_optimum() -> None:
    pytest.importorskip("ortools")
    from benchmarks.transition_schedule import LOOSE, trials_table

    outcomes = trials_table(300, 16, 5.0)
    assert all(outcome.complete and outcome.over_bytes <= 0 for outcome in outcomes)
    assert sum(outcome.unneeded_spill for outcome in outcomes) <= 3
    for loose, limit in ((True, 0.05), (False, 0.15)):
        gaps = [o.gap for o in outcomes if o.gap is not None and (o.slack in LOOSE) is loose]
        assert sum(gaps) / len(gaps) <= limit


@pytest.mark.slow
def test_dense_problems_stay_near_the_optimum() -> None:
    pytest.importorskip("ortools")
    from benchmarks.dense_transfers import dense_problem
    from benchmarks.transition_optimum import solve
    from nereus.emu.certificate import components, find_sequence
    from nereus.emu.list_schedule import shortest

    for slack, limit in ((1.0, 0.15), (2.0, 0.05)):
        gaps = []
        for seed in range(12):
            problem = dense_problem(seed, num_gpus=8, slack=slack)
            sequences = [find_sequence(problem, group, problem.used) for group in components(problem)]
            found = [sequence for sequence in sequences if sequence is not None]
            if len(found) < len(sequences):
                assert solve(problem, limit_s=20.0).makespan_s is None
                continue
            timeline = shortest(problem, found)
            best = solve(problem, limit_s=20.0, hint=timeline.start_s)
            assert best.makespan_s is not None
            gaps.append(timeline.makespan_s / best.makespan_s - 1)
        assert sum(gaps) / len(gaps) <= limit


def test_planning_a_thousand_gpus_takes_milliseconds() -> None:
    models = large_models()
    sizes, topology = sizes_of(models), Topology.uniform(1024, 8)
    before, target = (large_state(models, places, 1024) for places in (START, LONGER))
    spent = []
    for _ in range(9):
        started = time.process_time()
        found = schedule(build_graph(before, target, topology), sizes, AMPLE, topology)
        spent.append(time.process_time() - started)
    assert len(found.graph.chains) == 144
    # 2.2 ms measured; twice the goal of 5 ms leaves room for a slower machine, the least of nine for others.
    assert min(spent) < 0.010


def test_a_large_tight_transition_completes() -> None:
    models = large_models()
    sizes, topology = sizes_of(models), Topology.uniform(1024, 8)
    before, target = (large_state(models, places, 1024) for places in (START, LONGER))
    graph = build_graph(before, target, topology)
    problem = problem_of(graph, sizes, Room(cap_bytes=int(110e9)), estimated(sizes, topology))
    found = schedule(graph, sizes, Room(cap_bytes=int(110e9)), topology)
    assert len(found.tight) == 768
    assert max(found.peak_bytes.values()) <= 110e9
    assert len(problem.bins) < 128  # ranks that go through the same changes count as one


def test_explain_names_every_operation_and_every_wait() -> None:
    tight = next(t for t in (trial(seed, slack=0.5) for seed in range(40)) if scheduled(t).spilled_bytes)
    found = scheduled(tight)
    text = explain(found)
    for chain in found.graph.chains:
        assert chain.id in text
    assert text.count("Merge ") == sum(node.kind == "merge" for node in found.graph.nodes)
    assert "to host memory" in text
    assert text.count("which frees memory") == sum(edge[2] == "resource" for edge in found.graph.edges)


def test_the_picture_is_well_formed_and_has_a_box_for_every_operation() -> None:
    from xml.etree import ElementTree

    found = scheduled(trial(5, slack=0.5))
    root = ElementTree.fromstring(svg(found.graph))
    boxes = root.findall(".//{http://www.w3.org/2000/svg}g")
    assert len(boxes) == len(found.graph.nodes)
    assert found.graph.spills


def test_the_picture_of_a_large_transition_joins_chains_that_are_alike() -> None:
    models = large_models()
    before, target = (large_state(models, places, 1024) for places in (START, LONGER))
    picture = svg(build_graph(before, target).with_edges([]))
    assert picture.count("<g>") < 10
    assert "x 128" in picture
