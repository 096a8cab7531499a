"""Message times obey what any network obeys."""

from __future__ import annotations

import numpy as np
import pytest

from nereus.planner.collective_time import all_reduce_s, group_all_reduce_s, point_to_point_s
from nereus.planner.profile import ClusterProfile, LinkClass, builtin_links

SIZES = 2.0 ** np.arange(8, 31)


@pytest.mark.parametrize("name", sorted(builtin_links()))
@pytest.mark.parametrize("captured", [False, True])
def test_larger_messages_and_groups_take_longer(name: str, captured: bool) -> None:
    link = builtin_links()[name]
    times = np.stack([group_all_reduce_s(link, SIZES, ranks, captured=captured) for ranks in (2, 4, 8)])
    assert (np.diff(times, axis=1) >= -1e-12).all()
    assert (
        times[2, -6:] >= 0.65 * times[0, -6:]
    ).all()  # NVLink with in-switch reduction hardly grows with the group
    assert (group_all_reduce_s(link, SIZES, 1) == 0).all()


@pytest.mark.parametrize("name", ["nvlink3", "nvlink4", "nvlink5", "ib-400"])
def test_no_all_reduce_beats_half_the_wire(name: str) -> None:
    link = builtin_links()[name]
    size = 2.0**28
    # In-switch reduction sends every byte once where a ring sends it almost twice.
    assert group_all_reduce_s(link, size, 8) > 0.9 * size / link.bandwidth_Bps


def test_strided_groups_reduce_inside_the_node_first() -> None:
    cluster = ClusterProfile.parse("4x8xH100")
    up, out = all_reduce_s(cluster, "H100", 1e9, 16, 2)
    whole_up, whole_out = all_reduce_s(cluster, "H100", 1e9, 4, 8)
    assert up > 0
    assert whole_up == 0
    # Four ranks a node share the node's network links: each carries a quarter.
    assert out == pytest.approx(whole_out / 4, rel=0.05)


def test_group_inside_a_node_stays_off_the_network() -> None:
    cluster = ClusterProfile.parse("4x8xH100")
    _, out = all_reduce_s(cluster, "H100", 1e9, np.array([1, 2, 8]), 1)
    assert (out == 0).all()


def test_network_is_slower_than_the_node() -> None:
    cluster = ClusterProfile.parse("4x8xH100")
    near = point_to_point_s(cluster, "H100", 1e9, LinkClass.SCALE_UP)
    assert near < point_to_point_s(cluster, "H100", 1e9, LinkClass.SCALE_OUT)
