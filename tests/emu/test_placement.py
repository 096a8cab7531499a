"""Placement: the best overlap, tensor-parallel groups inside nodes, pins, ties that keep what was given."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.layout import Layout, Rank
from nereus.emu.partition import Partition, cut_of, partition
from nereus.emu.placement import holdings, place
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit
from tests.emu.states import random_model
from tests.emu.test_reshard import BF16, mixed_units, small_model, units_of


def part_of(model: ModelSpec, *units: Unit) -> Partition:
    return partition(model, tuple(sorted({cut_of(unit.layout) for unit in units})))


def overlap(part: Partition, old: tuple[Unit, ...], new: tuple[Unit, ...]) -> int:
    """Elements that stay on their rank."""
    ranks = sorted({rank for unit in (*old, *new) for rank in unit.layout.ranks})
    both = holdings(part, old, ranks) & holdings(part, new, ranks)
    return int((both @ part.num_elements).sum())


def placed(
    model: ModelSpec, old: tuple[Unit, ...], new: tuple[Unit, ...], topology: Topology
) -> tuple[Unit, ...]:
    return place(part_of(model, *old, *new), old, new, topology)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_overlap_on_one_node_is_that_of_the_best_permutation(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    old = mixed_units(rng, model, BF16, tuple(range(5)), first=0)
    new = mixed_units(rng, model, BF16, tuple(range(5)), first=10)
    part = part_of(model, *old, *new)
    ranks = [rank for unit in new for rank in unit.layout.ranks]

    def with_ranks(order: tuple[Rank, ...]) -> tuple[Unit, ...]:
        taken = iter(order)
        return tuple(
            unit.with_layout(unit.layout.with_ranks(tuple(next(taken) for _ in unit.layout.ranks)))
            for unit in new
        )

    best = max(overlap(part, old, with_ranks(order)) for order in permutations(ranks))
    assert overlap(part, old, place(part, old, new, Topology.single_node(5))) == best


def test_split_by_position_keeps_half_of_each_shard() -> None:
    """tp4 -> 2 x tp2: ranks that hold neighbouring quarters go to different units."""
    model = small_model(vocab_size=64)
    new = placed(model, units_of(model, 4, 1), units_of(model, 2, 1, 2), Topology.single_node(4))
    assert {rank for unit in new for rank in unit.layout.ranks[:1]} == {0, 1}
    assert {rank for unit in new for rank in unit.layout.ranks[1:]} == {2, 3}


def test_tensor_parallel_groups_stay_inside_nodes() -> None:
    model = small_model()
    for seed in range(30):
        rng = random.Random(seed)
        num_nodes = rng.choice([2, 4])
        topology = Topology.uniform(num_nodes * 4, 4)
        ranks = tuple(rng.sample(range(num_nodes * 4), num_nodes * 4))
        tp, pp = rng.choice([(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
        new = units_of(model, tp, pp, len(ranks) // (tp * pp), ranks=ranks)
        old = units_of(model, *rng.choice([(4, 1), (2, 2), (1, 4)]))
        for unit in placed(model, old, new, topology):
            for stage in range(pp):
                assert len(set(topology.nodes_of(unit.layout.tp_group(stage)))) == 1


def test_given_ranks_win_where_assigning_groups_to_nodes_would_lose() -> None:
    model = small_model()
    for seed in range(40):
        rng = random.Random(seed)
        topology = Topology.uniform(8, 4)
        old = mixed_units(rng, model, BF16, tuple(range(8)), first=0)
        new = units_of(model, *rng.choice([(2, 2, 2), (4, 1, 2), (2, 1, 4), (1, 4, 2)]))
        part = part_of(model, *old, *new)
        assert overlap(part, old, place(part, old, new, topology)) >= overlap(part, old, new)


def test_a_group_larger_than_a_node_takes_ranks_across_nodes() -> None:
    model = small_model()
    new = placed(model, units_of(model, 4, 1, 2), units_of(model, 8, 1), Topology.uniform(8, 4))
    assert sorted(new[0].layout.ranks) == list(range(8))


def test_groups_that_fragments_cannot_hold_share_what_is_left() -> None:
    model = small_model()
    topology = Topology(nodes=((0, 1, 2), (3, 4, 5)))
    new = placed(model, units_of(model, 2, 1), units_of(model, 2, 1, 3), topology)
    assert sorted(rank for unit in new for rank in unit.layout.ranks) == list(range(6))
    inside = [len(set(topology.nodes_of(unit.layout.ranks))) == 1 for unit in new]
    assert sum(inside) == 2


def test_ties_keep_the_given_ranks() -> None:
    model = small_model()
    new = units_of(model, 2, 1, 2, ranks=(7, 5, 6, 4))
    assert placed(model, units_of(model, 2, 1), new, Topology.single_node(8)) == new


@pytest.mark.parametrize("pinned", [(0,), (3,), (0, 1, 2, 3)])
def test_pinned_groups_stay_as_given(pinned: tuple[Rank, ...]) -> None:
    model = small_model()
    old, new = units_of(model, 4, 1), units_of(model, 2, 1, 2)
    part = part_of(model, *old, *new)
    for before, after in zip(new, place(part, old, new, Topology.single_node(4), pinned=pinned), strict=True):
        if set(before.layout.ranks) & set(pinned):
            assert after == before


def test_lost_ranks_attract_nothing() -> None:
    model = small_model()
    old = units_of(model, 1, 1, 2)
    new = (old[0].with_layout(Layout(tp=1, pp=1, ranks=(1,), layers=(4,))),)
    part = part_of(model, *old)
    assert place(part, old, new, Topology.single_node(2), lost=(0,)) == new
