"""What a reshard plan amounts to: traffic by rank and link, seconds, collectives it equals, words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nereus.emu.layout import Rank
from nereus.emu.partition import Partition
from nereus.emu.sources import Route
from nereus.emu.topology import Topology

if TYPE_CHECKING:
    from nereus.emu.reshard import ReshardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that leave and reach each rank, by whether they stay on the node."""

    sent_node: Mapping[Rank, int]
    sent_network: Mapping[Rank, int]
    received_node: Mapping[Rank, int]
    received_network: Mapping[Rank, int]

    def sent(self, rank: Rank) -> int:
        """All bytes a rank sends."""
        return self.sent_node.get(rank, 0) + self.sent_network.get(rank, 0)

    def received(self, rank: Rank) -> int:
        """All bytes a rank receives."""
        return self.received_node.get(rank, 0) + self.received_network.get(rank, 0)

    @property
    def max_sent(self) -> int:
        """Bytes of the busiest sender."""
        return max((self.sent(rank) for rank in {*self.sent_node, *self.sent_network}), default=0)

    @property
    def max_received(self) -> int:
        """Bytes of the busiest receiver."""
        return max((self.received(rank) for rank in {*self.received_node, *self.received_network}), default=0)


def traffic(routes: Sequence[Route], topology: Topology, bytes_per_element: int) -> Traffic:
    """Count the bytes of every hop."""
    counters: dict[str, Counter[Rank]] = defaultdict(Counter)
    for route in routes:
        size = route.num_elements * bytes_per_element
        for source, target in route.hops:
            near = topology.node_of(source) == topology.node_of(target)
            link = "node" if near else "network"
            counters["sent_" + link][source] += size
            counters["received_" + link][target] += size
    return Traffic(
        sent_node=counters["sent_node"],
        sent_network=counters["sent_network"],
        received_node=counters["received_node"],
        received_network=counters["received_network"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A part of the plan that equals a collective. `ranks[0]` is the root of a broadcast; `num_bytes` is what
    each member contributes (all_gather) or what the root sends (broadcast).
    """

    kind: Literal["all_gather", "broadcast"]
    ranks: tuple[Rank, ...]
    num_bytes: int


def collectives(routes: Sequence[Route], part: Partition, bytes_per_element: int) -> tuple[Collective, ...]:
    """Relay chains are broadcasts; ranks that all send equal bytes to all others are an all-gather.

    All-gathers are sought segment by segment (the same layers at every rank), so that a padded vocabulary,
    which is cut unevenly, does not hide them.
    """
    chains: Counter[tuple[Rank, ...]] = Counter()
    targets: dict[tuple[Rank, int], set[Rank]] = defaultdict(set)
    for route in routes:
        if len(route.path) > 2:
            chains[route.path] += route.num_elements
        elif route.num_elements == int(part.num_elements[list(route.blocks)].sum()):
            for block in route.blocks:
                targets[route.path[0], block].add(route.path[1])
    given: dict[tuple[frozenset[Rank], int, tuple[int, ...]], Counter[Rank]] = defaultdict(Counter)
    for (source, number), receivers in targets.items():
        segment = part.blocks[number]
        group = frozenset(receivers | {source})
        given[group, segment.kind, segment.instances][source] += int(part.num_elements[number])
    gathers: Counter[frozenset[Rank]] = Counter()
    for (group, _, _), sizes in given.items():
        if len(group) > 1 and set(sizes) == group and len(set(sizes.values())) == 1:
            gathers[group] += next(iter(sizes.values()))
    return (
        *(
            Collective(kind="broadcast", ranks=path, num_bytes=size * bytes_per_element)
            for path, size in sorted(chains.items())
        ),
        *(
            Collective(kind="all_gather", ranks=tuple(sorted(group)), num_bytes=size * bytes_per_element)
            for group, size in sorted(gathers.items(), key=lambda item: sorted(item[0]))
        ),
    )


def seconds(plan: ReshardPlan, topology: Topology) -> float:
    """Duration of the exchange: its busiest link, plus latency of the rounds and the fill of relay chains.

    max over ranks and link classes of bytes / bandwidth, and over nodes of the shared adapter's; local copies
    run beside it and count when they take longer.
    """
    flow = traffic(plan.routes, topology, plan.wire_bytes_per_element)
    busy = [0.0]
    for link, sent, received in (
        (topology.node, flow.sent_node, flow.received_node),
        (topology.network, flow.sent_network, flow.received_network),
    ):
        busy += [size / link.bytes_per_s for counts in (sent, received) for size in counts.values()]
    if topology.node_network_bytes_per_s is not None:
        for counts in (flow.sent_network, flow.received_network):
            by_node: Counter[int] = Counter()
            for rank, size in counts.items():
                by_node[topology.node_of(rank)] += size
            busy += [size / topology.node_network_bytes_per_s for size in by_node.values()]
    busy.append(plan.max_local_bytes / topology.memory.bytes_per_s)
    link = topology.network if flow.sent_network else topology.node
    fill = plan.streams.fill_bytes / link.bytes_per_s
    return max(busy) + plan.streams.num_rounds * link.latency_s + fill


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def explain_plan(plan: ReshardPlan) -> str:
    """Units before and after, bytes against the bound, the busiest ranks, collectives and predicted time."""
    flow = plan.traffic
    kept = [unit for unit in plan.new if unit in plan.old]
    kinds = ", ".join(
        move.target.name if not move.casts else f"{move.source.name} {move.source.dtype}->{move.target.dtype}"
        for move in plan.moves
    )
    ratio = plan.bytes / plan.lower_bound if plan.lower_bound else 1.0
    lines = [
        f"reshard plan {plan.digest[:12]}: {kinds}",
        *(f"  from  {unit}" for unit in plan.old),
        *(f"  to    {unit}{' (kept)' if unit in kept else ''}" for unit in plan.new),
        f"  wire  {_size(plan.bytes)}, {ratio:.2f} of the lower bound; local copies at most "
        f"{_size(plan.max_local_bytes)} a rank",
        f"  busiest sender {_size(flow.max_sent)}, busiest receiver {_size(flow.max_received)}; "
        f"{len(plan.streams.items)} flows, {plan.streams.num_rounds} rounds",
    ]
    if across := sum(flow.sent_network.values()):
        lines.append(f"  between nodes {_size(across)}, within {_size(sum(flow.sent_node.values()))}")
    if plan.collectives:
        counts = Counter((item.kind, len(item.ranks)) for item in plan.collectives)
        words = (f"{n} x {kind} over {size}" for (kind, size), n in sorted(counts.items()))
        lines.append("  equal to " + ", ".join(words))
    if plan.lost:
        lines.append(f"  without lost ranks {sorted(plan.lost)}")
    lines.append(f"  about {plan.seconds():.3g} s on {len(plan.topology.nodes)} node(s)")
    return "\n".join(lines)
