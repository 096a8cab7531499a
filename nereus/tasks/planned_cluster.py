"""The campaign's GPUs as the planner counts them."""

from __future__ import annotations

from dataclasses import replace

from nereus.config import CampaignConfig
from nereus.emu.serving import CPU_CACHE_BYTES
from nereus.planner.profile import ClusterProfile
from nereus.tasks.device import device, kind_of_device

CACHE_SHARE = 0.3
"""Of a GPU's memory, for a cache of fixed size beside the state of training; passes need the rest."""


def cluster_of(config: CampaignConfig) -> ClusterProfile:
    """The campaign's GPUs as one node, with the memory that it may use of each."""
    cluster = ClusterProfile.parse(f"1x{config.cluster.gpus}x{gpu_kind(config)}")
    if config.cluster.gpu_memory_gb is None:
        return cluster
    (pool,) = cluster.pools
    gpu = replace(pool.gpu, memory_bytes=int(config.cluster.gpu_memory_gb * 1e9))
    return replace(cluster, pools=(replace(pool, gpu=gpu),))


def gpu_kind(config: CampaignConfig) -> str:
    """The kind of GPU to plan for: as configured, else by the device's own name. Raises ConfigError if
    unknown.
    """
    if config.cluster.gpu_kind is not None:
        return config.cluster.gpu_kind
    return kind_of_device(device(config))


def cache_limit(config: CampaignConfig) -> int:
    """Bytes of a KV cache of fixed size that has no bound of its own, in a plan that counts memory."""
    if device(config) == "cpu":
        return CPU_CACHE_BYTES
    return int(CACHE_SHARE * cluster_of(config).pools[0].gpu.memory_bytes)
