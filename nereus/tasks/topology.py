"""Where the workers of a job lie and how state travels between them, as all of its reshard plans see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nereus.config.environment import reads_memory
from nereus.emu.cluster import PooledGpu
from nereus.emu.layout import Rank
from nereus.emu.reshard import Limits
from nereus.emu.stage import StageSpec
from nereus.emu.topology import Topology


def topology_of(pool: Iterable[PooledGpu], stages: Mapping[str, StageSpec], *, device: str) -> Topology:
    """The nodes of the live workers, and one node for those that `stages` names and that are gone.

    CPU workers of a node read one another's memory, unless the user says no: plans then relay nothing there.
    """
    nodes: dict[int, list[Rank]] = {}
    for gpu in pool:
        nodes.setdefault(gpu.node, []).append(gpu.rank)
    known = {rank for ranks in nodes.values() for rank in ranks}
    gone = sorted({rank for spec in stages.values() for rank in spec.ranks} - known)
    return Topology(
        nodes=(*(tuple(ranks) for ranks in nodes.values()), *((tuple(gone),) if gone else ())),
        node_reads=device == "cpu" and reads_memory(),
    )


def limits_on(device: str) -> Limits:
    """Sizes of messages; broadcasts where they pay, which they do by NCCL alone."""
    return Limits(collectives="pays" if device == "cuda" else "never")
