"""How long a chain takes: by its reshard plan, or roughly, by its largest shard.

Chains of one shape, on whatever ranks, share one plan: a transition of a thousand GPUs has few shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nereus.emu.chains import Chain
from nereus.emu.layout import Rank
from nereus.emu.reshard import Limits, plan_reshard
from nereus.emu.shard_bytes import Sizes, shape_of
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit

Seconds = Callable[[Chain], float]


def estimated(sizes: Sizes, topology: Topology) -> Seconds:
    """Without a plan: the largest new shard over the slowest link that may be used, as if nothing were there.

    The receivers' bound when they hold nothing of it; senders are no slower, since plans relay and balance.
    """

    nodes = [frozenset(ranks) for ranks in topology.nodes]
    largest: dict[object, int] = {}

    def shard(unit: Unit) -> int:
        key = shape_of(unit)
        found = largest.get(key)
        if found is None:
            found = largest[key] = max(sizes(unit))
        return found

    def seconds(chain: Chain) -> float:
        makes = chain.makes
        if not makes:
            return 0.0
        home = nodes[topology.node_of(makes[0].layout.ranks[0])]
        near = all(home.issuperset(unit.layout.ranks) for units in (makes, chain.reads) for unit in units)
        link = topology.node if near else topology.network
        return max([shard(unit) for unit in makes]) / link.bytes_per_s + link.latency_s

    return seconds


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
