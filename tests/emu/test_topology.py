"""Topologies: which node a rank lies on."""

from __future__ import annotations

import pytest

from nereus.emu.topology import Topology
from nereus.errors import InvalidLayout


def test_ranks_fill_nodes_in_order() -> None:
    topology = Topology.uniform(10, 4)
    assert topology.nodes == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
    assert topology.nodes_of((9, 0, 5)) == [2, 0, 1]
    assert Topology.single_node(3).nodes_of(range(3)) == [0, 0, 0]


def test_a_rank_on_no_node_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="rank 4 lies on no node"):
        Topology.single_node(4).node_of(4)


def test_topologies_are_values() -> None:
    assert Topology.uniform(8, 4) == Topology.uniform(8, 4)
    assert len({Topology.uniform(8, 4), Topology.uniform(8, 4), Topology.single_node(8)}) == 2
