"""Where ranks lie and how fast they talk: nodes, and one link class each for a rank's memory, a node, the
network between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from nereus.emu.layout import Rank
from nereus.errors import InvalidLayout, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One-way bandwidth of one rank, full duplex, and the latency of one message."""

    bytes_per_s: float
    latency_s: float


# Defaults: HBM copy, NVLink 4 and one 400 Gb/s adapter a GPU. A calibrated profile replaces them.
MEMORY = Link(bytes_per_s=1.5e12, latency_s=5e-6)
NODE = Link(bytes_per_s=300e9, latency_s=1e-5)
NETWORK = Link(bytes_per_s=45e9, latency_s=2e-5)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`nodes[i]` are the ranks of node i. `node_network_bytes_per_s` caps what one node exchanges with others
    in each direction, None where every rank has its own adapter. With `node_reads` the ranks of a node read
    one another's memory (CPU workers): a copy then costs its receiver alone, and relays within a node only
    delay.
    """

    nodes: tuple[tuple[Rank, ...], ...]
    memory: Link = MEMORY
    node: Link = NODE
    network: Link = NETWORK
    node_network_bytes_per_s: float | None = None
    node_reads: bool = False

    @classmethod
    def single_node(cls, num_ranks: int, *, node_reads: bool = False) -> Topology:
        """Ranks 0..n-1 on one node."""
        return cls(nodes=(tuple(range(num_ranks)),), node_reads=node_reads)

    @classmethod
    def uniform(cls, num_ranks: int, ranks_per_node: int) -> Topology:
        """Ranks 0..n-1, consecutive ones on a node; the last node may be smaller."""
        starts = range(0, num_ranks, ranks_per_node)
        return cls(nodes=tuple(tuple(range(lo, min(num_ranks, lo + ranks_per_node))) for lo in starts))

    @cached_property
    def _node_of(self) -> dict[Rank, int]:
        return {rank: index for index, ranks in enumerate(self.nodes) for rank in ranks}

    def node_of(self, rank: Rank) -> int:
        """Index of the node that a rank lies on. Raises InvalidLayout for a rank on no node."""
        try:
            return self._node_of[rank]
        except KeyError:
            raise InvalidLayout(
                explain(
                    f"rank {rank} lies on no node of the topology",
                    values=f"{len(self._node_of)} ranks on {len(self.nodes)} nodes",
                    rule="every rank of a unit lies on a node",
                    remedy="describe the cluster as it is now",
                )
            ) from None

    def nodes_of(self, ranks: Iterable[Rank]) -> list[int]:
        """The node of every rank, in order."""
        return [self.node_of(rank) for rank in ranks]
