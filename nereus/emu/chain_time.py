"""How long a chain takes: by its reshard plan, or roughly, by its largest shard.

Chains of one shape, on whatever ranks, share one plan: a transition of a thousand GPUs has few shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain as joined

import numpy as np

from nereus.emu.chains import Chain
from nereus.emu.footprint import Footprint, Ints, footprint
from nereus.emu.layout import Rank
from nereus.emu.reshard import Limits, plan_reshard
from nereus.emu.shard_bytes import Sizes, bytes_of
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit

Seconds = Callable[[Chain], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds without a plan, for one chain or for all at once; see `estimated`."""

    sizes: Sizes
    topology: Topology

    def __call__(self, chain: Chain) -> float:
        """Seconds of one chain."""
        return self.of_all(1, footprint((chain,)), bytes_of(chain.makes, self.sizes))[0]

    def of_all(self, num_chains: int, lie: Footprint, made: Ints) -> list[float]:
        """Seconds of every chain; `made` are the bytes of the shards of `lie.makes`.

        Raises InvalidLayout where the first new rank of a chain lies on no node.
        """
        first = np.flatnonzero(np.diff(lie.makes.chains, prepend=-1))
        if not len(first):
            return [0.0] * num_chains
        node, makers, homes = self._nodes(lie.num_ranks), lie.makes.chains[first], lie.makes.ranks[first]
        for rank in homes[node[homes] < 0].tolist():
            self.topology.node_of(rank)
        home = np.full(num_chains, -1)
        home[makers] = node[homes]
        is_near = np.full(num_chains, True)
        for part in (lie.makes, lie.reads):
            is_near[part.chains[node[part.ranks] != home[part.chains]]] = False
        near, far, is_near = self.topology.node, self.topology.network, is_near[makers]
        out = np.zeros(num_chains)
        out[makers] = np.maximum.reduceat(made, first) / np.where(is_near, near.bytes_per_s, far.bytes_per_s)
        out[makers] += np.where(is_near, near.latency_s, far.latency_s)
        seconds: list[float] = out.tolist()
        return seconds

    def _nodes(self, num_ranks: int) -> Ints:
        """The node of every rank, -1 where it has none."""
        nodes = self.topology.nodes
        ranks = np.fromiter(joined.from_iterable(nodes), dtype=np.int64)
        out = np.full(max(num_ranks, 1 + int(ranks.max(initial=-1))), -1)
        out[ranks] = np.repeat(np.arange(len(nodes)), [*map(len, nodes)])
        return out


def estimated(sizes: Sizes, topology: Topology) -> Estimate:
    """Without a plan: the largest new shard over the slowest link that may be used, as if nothing were there.

    The receivers' bound when they hold nothing of it; senders are no slower, since plans relay and balance.
    """
    return Estimate(sizes, topology)


def planned(models: Mapping[str, ModelSpec], topology: Topology, *, limits: Limits | None = None) -> Seconds:
    """What the reshard plan of the chain predicts; one plan for all chains of equal shape."""
    known: dict[object, float] = {}

    def seconds(chain: Chain) -> float:
        if not chain.makes:
            return 0.0
        reads, new = chain.reads, (*chain.stays, *chain.makes)
        number: dict[Rank, int] = {}
        for unit in (*reads, *new):
            for rank in unit.layout.ranks:
                number.setdefault(rank, len(number))
        nodes: dict[int, list[Rank]] = {}
        for rank, alias in number.items():
            nodes.setdefault(topology.node_of(rank), []).append(alias)
        alike = tuple(tuple(members) for members in nodes.values())
        old_units, new_units = (tuple(_renumbered(unit, number) for unit in units) for units in (reads, new))
        key = (
            chain.model,
            tuple((unit.layout, unit.kinds) for unit in old_units),
            tuple((unit.layout, unit.kinds) for unit in new_units),
            alike,
        )
        if key not in known:
            small = Topology(
                nodes=alike,
                memory=topology.memory,
                node=topology.node,
                network=topology.network,
                node_network_bytes_per_s=topology.node_network_bytes_per_s,
            )
            plan = plan_reshard(
                models[chain.model], old_units, new_units, topology=small, placement="as_given", limits=limits
            )
            known[key] = plan.seconds()
        return known[key]

    return seconds


def _renumbered(unit: Unit, number: Mapping[Rank, int]) -> Unit:
    return unit.with_layout(unit.layout.with_ranks(tuple(number[rank] for rank in unit.layout.ranks)))
