"""Where the workers of a job lie, as the plans of a transition see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nereus.emu.cluster import PooledGpu
from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.emu.topology import Topology


def topology_of(pool: Iterable[PooledGpu], stages: Mapping[str, StageSpec]) -> Topology:
    """The nodes of the live workers, and one node for those that `stages` names and that are gone."""
    nodes: dict[int, list[Rank]] = {}
    for gpu in pool:
        nodes.setdefault(gpu.node, []).append(gpu.rank)
    known = {rank for ranks in nodes.values() for rank in ranks}
    gone = sorted({rank for spec in stages.values() for rank in spec.ranks} - known)
    return Topology(nodes=(*(tuple(ranks) for ranks in nodes.values()), *((tuple(gone),) if gone else ())))
