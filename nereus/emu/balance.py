"""Balance of senders: every receiver gets a feeder, then load moves off the busiest ones.

A receiver is fed by a holder, or by the tail of a chain of receivers that were fed before it (a relay). The
least loaded feeder serves, largest bundle first. Then two kinds of move relieve senders that are busier than
the busiest receiver.

Why loads that no shift between holders improves are optimal: they minimise a convex sum over a product of
simplices, whose optimum is exactly the point where every used holder of a demand carries no more than an
unused one (Kuhn-Tucker). Cuts fall between rows, which is the only loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nereus.emu.partition import Partition


@dataclass(frozen=True, slots=True)
class Bundle:
    """Row numbers of holders and receivers, and the blocks that all of them share."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    blocks: tuple[int, ...]
    num_elements: int


@dataclass(slots=True)
class Share:
    """Elements [lo, hi) of a bundle on their way: from `holder` to the chain's head, and on to its tail.

    `choices` are the holders that may feed the head: those on its node, or all where there is none.
    """

    bundle: int
    chain: tuple[int, ...]
    choices: tuple[int, ...]
    holder: int
    lo: int
    hi: int

    @property
    def size(self) -> int:
        """Elements of the share."""
        return self.hi - self.lo


class Loads:
    """What every row sends, while feeders are being chosen: elements times the cost of their link.

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

    def least(self, choices: Sequence[int], target: int) -> int:
        """The least loaded row; ties go to the node that sends least, then to the next row upwards."""
        num = len(self.rows)
        return min(
            choices, key=lambda row: (self.rows[row], self.node_out[self.nodes[row]], (row - target) % num)
        )

    def most_received(self, shares: list[Share]) -> int:
        """What the busiest receiver receives, in the same measure."""
        received = [0] * len(self.rows)
        for share in shares:
            for source, target in zip((share.holder, *share.chain), share.chain, strict=False):
                received[target] += share.size * self.cost(source, target)
        return max(received, default=0)


def assign(bundles: list[Bundle], loads: Loads, relay_elements: int) -> list[Share]:
    """Feed every receiver of every bundle, bundles without a choice of holder and large ones first.

    Only bundles of at least `relay_elements` are relayed.
    """
    order = sorted(
        range(len(bundles)), key=lambda i: (len(bundles[i].holders) > 1, -bundles[i].num_elements, i)
    )
    shares: list[Share] = []
    for number in order:
        shares += _feed(number, bundles[number], loads, bundles[number].num_elements >= relay_elements)
    return shares


def _feed(number: int, bundle: Bundle, loads: Loads, relay: bool) -> list[Share]:
    """One bundle's receivers, node by node: a node without a holder is entered once, then relays inside."""
    nodes = loads.nodes
    size = bundle.num_elements
    by_tail: dict[int, Share] = {}
    for target in sorted(bundle.needers, key=lambda row: (nodes[row], row)):
        near = tuple(row for row in bundle.holders if nodes[row] == nodes[target])
        tails = tuple(by_tail) if relay else ()
        near_tails = tuple(row for row in tails if nodes[row] == nodes[target])
        choices = near or bundle.holders
        holders, relays = (near, near_tails) if near or near_tails else (bundle.holders, tails)
        feeder = loads.least(holders, target) if holders else None
        tail = loads.least(relays, target) if relays else None
        if tail is not None and (feeder is None or loads.rows[tail] < loads.rows[feeder]):
            loads.add(tail, size, target)
            share = by_tail.pop(tail)
            share.chain = (*share.chain, target)
        else:
            assert feeder is not None, f"I8: nobody feeds row {target}"
            loads.add(feeder, size, target)
            share = Share(number, (target,), choices, feeder, 0, size)
        by_tail[target] = share
    return list(by_tail.values())


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
            of_bundle[share.bundle].append(share)
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
            size, head = share.size, share.chain[0]
            if size < self.relay_elements or size < self.bundles[share.bundle].num_elements:
                continue
            near = nodes[busiest] == nodes[head]
            for other in self.of_bundle[share.bundle]:
                tail = other.chain[-1]
                away = nodes[tail] != nodes[head]
                if other is share or other.size < size or (near and away):
                    continue
                key = rows[tail] + size * self.loads.cost(tail, head), away, tail
                if key[0] < rows[busiest] - self.tolerance and (best is None or key < best[0]):
                    best = key, share, other
        if best is None:
            return False
        (_, _, tail), share, other = best
        size, head = share.size, share.chain[0]
        self.loads.add(busiest, -size, head)
        self.loads.add(tail, size, head)
        self.mine[busiest].remove(share)
        self.of_bundle[share.bundle].remove(share)
        other.chain = (*other.chain, *share.chain)
        return True

    def _shift(self, busiest: int) -> bool:
        """Pass a part of one share of the busiest holder to the least-loaded other one."""
        rows = self.loads.rows
        best: tuple[int, Share, int] | None = None
        for share in self.mine[busiest]:
            other = self.loads.least(share.choices, share.chain[0])
            cost = self.loads.cost(busiest, share.chain[0])
            room = min(share.size * cost, (rows[busiest] - rows[other]) // 2)
            if room > self.tolerance and (best is None or room > best[0]):
                best = room, share, other
        if best is None:
            return False
        room, share, other = best
        elements = room // self.loads.cost(busiest, share.chain[0])
        middle = _snap(self.bundles[share.bundle].blocks, self.part, share.hi - elements)
        if not share.lo <= middle < share.hi:
            return False
        size, target = share.hi - middle, share.chain[0]
        self.loads.add(busiest, -size, target)
        self.loads.add(other, size, target)
        moved = replace(share, holder=other, lo=middle)
        self.mine[other].append(moved)
        self.of_bundle[share.bundle].append(moved)
        share.hi = middle
        if share.lo == share.hi:
            self.mine[busiest].remove(share)
            self.of_bundle[share.bundle].remove(share)
        return True


def _snap(blocks: tuple[int, ...], part: Partition, at: int) -> int:
    start = 0
    for block in blocks:
        size = int(part.num_elements[block])
        if at < start + size:
            return start + part.blocks[block].snap(at - start)
        start += size
    return at
