"""Balance of senders: demands are given to holders, then shares move off the busiest ones.

Why shares that no single move improves are optimal: the loads minimise a convex sum over a product of
simplices, whose optimum is exactly the point where every used holder of a demand carries no more than an
unused one (Kuhn-Tucker). Cuts fall between rows, which is the only loss.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from nereus.emu.partition import Partition


@dataclass(frozen=True, slots=True)
class Bundle:
    """Row numbers of holders and receivers, and the blocks they share."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    blocks: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True, slots=True)
class Demand:
    """A chain of receivers that one holder must feed; `choices` are the holders that may."""

    bundle: int
    chain: tuple[int, ...]
    choices: tuple[int, ...]


@dataclass(slots=True)
class Share:
    """A part of a demand and the holder that feeds it."""

    demand: Demand
    holder: int
    lo: int
    hi: int


class Loads:
    """What every row sends, while holders are being chosen: elements times the cost of their link.

    `costs` are those of an element within a node and between nodes, in proportion to the links' time a byte.
    """

    def __init__(self, num_rows: int, nodes: list[int], costs: tuple[int, int]) -> None:
        self.rows = [0] * num_rows
        self.nodes = nodes
        self.costs = costs
        self.node_out: dict[int, int] = defaultdict(int)

    def cost(self, source: int, target: int) -> int:
        """Cost of one element from source to target."""
        return self.costs[self.nodes[source] != self.nodes[target]]

    def add(self, row: int, size: int, target: int) -> None:
        """Count elements that `row` sends to `target`."""
        self.rows[row] += size * self.cost(row, target)
        if self.nodes[row] != self.nodes[target]:
            self.node_out[self.nodes[row]] += size

    def least(self, demand: Demand) -> int:
        """The least-loaded holder; ties go to the node that sends least, then to the next row upwards."""
        if len(demand.choices) == 1:
            return demand.choices[0]
        target, num = demand.chain[0], len(self.rows)
        return min(
            demand.choices,
            key=lambda row: (self.rows[row], self.node_out[self.nodes[row]], (row - target) % num),
        )

    def most_received(self, demands: list[Demand], bundles: list[Bundle]) -> int:
        """What the busiest receiver receives, in the same measure; it does not depend on who is chosen."""
        received = [0] * len(self.rows)
        for demand in demands:
            senders = (demand.choices[0], *demand.chain)
            for source, target in zip(senders, demand.chain, strict=False):
                received[target] += bundles[demand.bundle].num_elements * self.cost(source, target)
        return max(received, default=0)


def assign(demands: list[Demand], bundles: list[Bundle], loads: Loads) -> list[Share]:
    """Largest demand first to its least-loaded holder."""
    for demand in demands:
        for sender, receiver in zip(demand.chain, demand.chain[1:], strict=False):
            loads.add(sender, bundles[demand.bundle].num_elements, receiver)
    order = sorted(
        range(len(demands)),
        # Demands without a choice first, so that the others can avoid their holders.
        key=lambda i: (len(demands[i].choices) > 1, -bundles[demands[i].bundle].num_elements, i),
    )
    shares: list[Share] = []
    for index in order:
        demand = demands[index]
        size = bundles[demand.bundle].num_elements
        holder = loads.least(demand)
        loads.add(holder, size, demand.chain[0])
        shares.append(Share(demand, holder, 0, size))
    return shares


@dataclass(slots=True)
class Levelling:
    """Moves load off the busiest senders until none is above `floor` or no move helps.

    Two moves: a chain is fed by the tail of another chain of its bundle (a relay takes the load), or a part
    of a share passes to a less busy holder.
    """

    bundles: list[Bundle]
    part: Partition
    loads: Loads
    floor: int
    relay_elements: int
    mine: dict[int, list[Share]]
    of_bundle: dict[int, list[Share]]

    @classmethod
    def of(
        cls,
        shares: list[Share],
        bundles: list[Bundle],
        part: Partition,
        loads: Loads,
        *,
        floor: int,
        relay_elements: int,
    ) -> Levelling:
        """Index the shares by holder and by bundle."""
        mine: dict[int, list[Share]] = defaultdict(list)
        of_bundle: dict[int, list[Share]] = defaultdict(list)
        for share in shares:
            mine[share.holder].append(share)
            of_bundle[share.demand.bundle].append(share)
        return cls(bundles, part, loads, floor, relay_elements, mine, of_bundle)

    @property
    def tolerance(self) -> int:
        """A finer balance would cost more messages than it saves."""
        return max(1, self.floor // 64)

    def run(self) -> list[Share]:
        """The levelled shares, by holder."""
        stuck: set[int] = set()
        while True:
            limit = self.floor + self.tolerance
            over = [row for row in self.mine if self.loads.rows[row] > limit and row not in stuck]
            if not over:
                break
            busiest = max(over, key=lambda row: (self.loads.rows[row], -row))
            moved = self._relay(busiest) or self._shift(busiest)
            # A move frees room elsewhere, so rows that could not move before may move now.
            stuck = set() if moved else stuck | {busiest}
        return [share for row in sorted(self.mine) for share in self.mine[row]]

    def _relay(self, busiest: int) -> bool:
        """Feed one whole chain of the busiest holder by the tail of another chain of the same bundle.

        A chain that is fed from its own node stays fed from its own node.
        """
        rows, nodes = self.loads.rows, self.loads.nodes
        best: tuple[tuple[int, bool, int], Share, Share] | None = None
        for share in self.mine[busiest]:
            size, head = share.hi - share.lo, share.demand.chain[0]
            if size < self.relay_elements or size < self.bundles[share.demand.bundle].num_elements:
                continue
            near = nodes[busiest] == nodes[head]
            for other in self.of_bundle[share.demand.bundle]:
                tail = other.demand.chain[-1]
                away = nodes[tail] != nodes[head]
                if other is share or other.hi - other.lo < size or (near and away):
                    continue
                key = rows[tail] + size * self.loads.cost(tail, head), away, tail
                if key[0] < rows[busiest] - self.tolerance and (best is None or key < best[0]):
                    best = key, share, other
        if best is None:
            return False
        (_, _, tail), share, other = best
        size, head = share.hi - share.lo, share.demand.chain[0]
        self.loads.add(busiest, -size, head)
        self.loads.add(tail, size, head)
        self.mine[busiest].remove(share)
        self.of_bundle[share.demand.bundle].remove(share)
        other.demand = replace(other.demand, chain=other.demand.chain + share.demand.chain)
        return True

    def _shift(self, busiest: int) -> bool:
        """Pass a part of one share of the busiest holder to the least-loaded other one."""
        rows = self.loads.rows
        best: tuple[int, Share, int] | None = None
        for share in self.mine[busiest]:
            other = self.loads.least(share.demand)
            cost = self.loads.cost(busiest, share.demand.chain[0])
            room = min((share.hi - share.lo) * cost, (rows[busiest] - rows[other]) // 2)
            if room > self.tolerance and (best is None or room > best[0]):
                best = room, share, other
        if best is None:
            return False
        room, share, other = best
        elements = room // self.loads.cost(busiest, share.demand.chain[0])
        middle = _snap(self.bundles[share.demand.bundle].blocks, self.part, share.hi - elements)
        if not share.lo <= middle < share.hi:
            return False
        size, target = share.hi - middle, share.demand.chain[0]
        self.loads.add(busiest, -size, target)
        self.loads.add(other, size, target)
        moved = replace(share, holder=other, lo=middle)
        self.mine[other].append(moved)
        self.of_bundle[share.demand.bundle].append(moved)
        share.hi = middle
        if share.lo == share.hi:
            self.mine[busiest].remove(share)
            self.of_bundle[share.demand.bundle].remove(share)
        return True


def _snap(blocks: tuple[int, ...], part: Partition, at: int) -> int:
    start = 0
    for block in blocks:
        size = int(part.num_elements[block])
        if at < start + size:
            return start + part.blocks[block].snap(at - start)
        start += size
    return at
