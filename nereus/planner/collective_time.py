"""How long a message takes: all-reduce, point to point and broadcast by link class."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.planner.profile import ClusterProfile, LinkClass, LinkProfile

Floats = NDArray[np.float64]


def ring_all_reduce_s(link: LinkProfile, size_bytes: ArrayLike, num_ranks: ArrayLike) -> Floats:
    """Seconds of an all-reduce of `size_bytes` over ranks that share one link class; 0 for one rank."""
    size, ranks = np.asarray(size_bytes, dtype=np.float64), np.asarray(num_ranks, dtype=np.float64)
    wire = 2 * (ranks - 1) / ranks * size / (link.bandwidth_Bps * link.efficiency)
    return np.asarray(np.where(ranks > 1, wire + link.latency_s * (1 + np.log2(np.maximum(ranks, 1))), 0.0))


def all_reduce_s(
    cluster: ClusterProfile, gpu_kind: str, size_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike
) -> tuple[Floats, Floats]:
    """Seconds (inside the node, across nodes) of an all-reduce over ranks that lie `stride` GPUs apart.

    Hierarchical: reduce inside the node first, so that each GPU's network link carries its share only.
    """
    per_node = cluster.pool(gpu_kind).gpus_per_node
    size, ranks = np.asarray(size_bytes, dtype=np.float64), np.asarray(num_ranks, dtype=np.float64)
    inside = np.clip(per_node // np.asarray(stride), 1, ranks)
    across = np.ceil(ranks / inside)
    up = ring_all_reduce_s(cluster.link(gpu_kind, LinkClass.SCALE_UP), size, inside)
    out = ring_all_reduce_s(cluster.link(gpu_kind, LinkClass.SCALE_OUT), size / inside, across)
    return up, out


def point_to_point_s(
    cluster: ClusterProfile, gpu_kind: str, size_bytes: ArrayLike, link_class: LinkClass
) -> Floats:
    """Seconds to send `size_bytes` from one GPU to another over a link class."""
    link = cluster.link(gpu_kind, link_class)
    return np.asarray(
        link.latency_s + np.asarray(size_bytes, dtype=np.float64) / (link.bandwidth_Bps * link.efficiency)
    )
