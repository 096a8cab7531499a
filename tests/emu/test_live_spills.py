"""Which old shards go to the host: enough on every rank, the cheapest that are, and only those that end."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.chain_time import estimated
from nereus.emu.chains import Chain
from nereus.emu.graph import build_graph
from nereus.emu.live_spills import Devices, needed_spills
from nereus.emu.schedule import schedule
from nereus.emu.schedule_problem import Room
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.topology import Topology
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import InvalidOperation
from tests.emu.test_transaction import CRITIC, MODEL, unit

LARGE = 1 << 40
MODELS = {"actor": MODEL, "critic": MODEL}


def ending(*sizes: int) -> tuple[tuple[Chain, ...], dict[UnitId, int]]:
    """One chain for each size, which ends a unit on rank 0."""
    units = [unit(0, 1, 1, 0, stage=f"actor.{at}") for at in range(len(sizes))]
    chains = tuple(
        Chain(id=str(at), model_stage=one.model_stage, operations=(), reads=(), ends=(one,), makes=())
        for at, one in enumerate(units)
    )
    return chains, dict(zip([one.id for one in units], sizes, strict=True))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(0, 200),
    st.integers(0, 9),
)
def test_the_cheapest_shards_that_make_enough_room_go(
    sizes: list[int], free: int, asked: int, staging: int
) -> None:
    chains, size = ending(*sizes)
    devices = Devices(
        asked_bytes={0: asked}, free_bytes={0: free}, host_bytes={0: LARGE}, staging_bytes={0: staging}
    )
    missing = asked - free
    able = [
        sum(some)
        for count in range(len(sizes) + 1)
        for some in combinations(sizes, count)
        if missing <= 0 or sum(some) >= missing + staging
    ]
    if not able:
        with pytest.raises(InvalidOperation, match="cannot move the state within the memory"):
            needed_spills(chains, devices, lambda one: (size[one.id],))
        return
    spills = needed_spills(chains, devices, lambda one: (size[one.id],))
    assert sum(spill.rank_bytes for _, spill in spills) == (0 if missing <= 0 else min(able))
    for number, spill in spills:
        assert chains[number].ends[0].id in spill.units


def test_a_host_without_room_and_a_rank_without_the_shard_are_refused() -> None:
    chains, size = ending(10)

    def sizes(one: Unit) -> tuple[int, ...]:
        return (size[one.id],)

    for host, stale in ((9, {}), (LARGE, {"actor.0": frozenset({0})})):
        devices = Devices(asked_bytes={0: 5}, free_bytes={0: 0}, host_bytes={0: host})
        with pytest.raises(InvalidOperation, match="rank 0 lacks 5 bytes"):
            needed_spills(chains, devices, sizes, stale)


def test_spills_come_before_whatever_is_made_on_their_ranks() -> None:
    ranks = frozenset(range(4))
    before = ClusterState.of([unit(0, 2, 1, 0, 1), unit(0, 2, 1, 2, 3, stage=CRITIC)], ranks)
    target = ClusterState.of([unit(1, 2, 1, 2, 3), unit(1, 1, 2, 0, 1, stage=CRITIC)], ranks)
    topology, sizes = Topology.single_node(4), sizes_of(MODELS)
    graph = build_graph(before, target, topology)
    each = dict.fromkeys(range(4), 1)
    devices = Devices(
        asked_bytes=each, free_bytes=dict.fromkeys(range(4), 0), host_bytes=dict.fromkeys(range(4), LARGE)
    )
    spills = needed_spills(graph.chains, devices, sizes)
    assert {rank for _, spill in spills for rank in spill.ranks} == ranks
    found = schedule(graph, sizes, Room(cap_bytes=LARGE), topology, estimated(sizes, topology), spills=spills)
    assert found.spilled_bytes == sum(spill.bytes for _, spill in spills) > 0
    assert found.tight == ranks
    starts = {slot.chain: slot.start_s for slot in found.slots if slot.spill is None}
    for chain, spill in spills:
        end = next(slot.end_s for slot in found.slots if slot.spill == spill)
        waits = [number for number, other in enumerate(graph.chains) if _makes_on(other, spill.ranks)]
        assert waits, "the rank was short of memory because something is made there"
        for number in {chain, *waits}:
            assert starts[number] >= end
            node = next(node for node in found.graph.nodes if node.chain == number and node.leads)
            assert any("spill" in name for name in found.graph.predecessors(node.id))


def _makes_on(chain: Chain, ranks: tuple[int, ...]) -> bool:
    return any(set(ranks) & made.ranks for made in chain.makes)


def test_nothing_goes_where_there_is_room_or_none_is_counted() -> None:
    chains, size = ending(10, 20)
    devices = Devices(asked_bytes={0: 5, 1: LARGE}, free_bytes={0: 5})
    assert needed_spills(chains, devices, lambda one: (size[one.id],)) == ()
