"""Who sends what to whom: a holder for every demanded block, and relays where copies are few.

Blocks with the same holders and the same receivers form a bundle. Each receiver of a bundle is fed by the
least loaded holder, or by the last of a chain of receivers that were fed before it, so that no holder sends
many copies; one on its own node serves before one elsewhere, and a node that holds none fetches one copy from
outside and passes it on inside. Then load moves off the busiest senders, to other holders or to relays, until
the busiest sender is no busier than the busiest receiver, or no move helps. Busy is bytes weighted by the
time a byte takes on its link.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from nereus.emu.balance import Bundle, Levelling, Loads, Share, assign
from nereus.emu.layout import Rank
from nereus.emu.partition import Bools, Ints, Partition
from nereus.emu.topology import Topology

NEVER = 1 << 62  # elements that no bundle has: no relays


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Elements `share` = [lo, hi) of `blocks` laid end to end travel along `path`.

    `path[0]` holds them; every further rank receives them, and passes them on when it is not the last.
    """

    path: tuple[Rank, ...]
    blocks: tuple[int, ...]
    share: tuple[int, int]

    @property
    def num_elements(self) -> int:
        """Elements that travel each hop."""
        return self.share[1] - self.share[0]

    @property
    def hops(self) -> tuple[tuple[Rank, Rank], ...]:
        """(sender, receiver) of every hop."""
        return tuple(zip(self.path, self.path[1:], strict=False))


def _bundles(have: Bools, remote: Bools, num_elements: Ints) -> list[Bundle]:
    wanted = np.flatnonzero(remote.any(axis=0))
    keys = np.packbits(np.concatenate([have[:, wanted], remote[:, wanted]]), axis=0).T
    blocks: dict[bytes, list[int]] = defaultdict(list)
    for block, key in zip(wanted.tolist(), keys, strict=True):
        blocks[key.tobytes()].append(block)
    return [
        Bundle(
            holders=tuple(np.flatnonzero(have[:, members[0]]).tolist()),
            needers=tuple(np.flatnonzero(remote[:, members[0]]).tolist()),
            blocks=tuple(members),
            num_elements=int(num_elements[members].sum()),
        )
        for members in blocks.values()
    ]


def choose_routes(
    part: Partition,
    have: Bools,
    remote: Bools,
    ranks: tuple[Rank, ...],
    topology: Topology,
    *,
    relay_elements: int,
) -> tuple[Route, ...]:
    """Routes that bring every `remote` block to its rank exactly once. Deterministic.

    `have` and `remote` are [ranks, blocks]: what a rank holds, and what it needs and lacks. Bundles of at
    least `relay_elements` are relayed when they are demanded more often than held, except on one node whose
    ranks read one another's memory. Every remote block must be held by some rank.
    """
    nodes = topology.nodes_of(ranks)
    if topology.node_reads and len(set(nodes)) == 1:
        relay_elements = NEVER
    bundles = _bundles(have, remote, part.num_elements)
    chosen = _balanced(bundles, part, nodes, topology, relay_elements)
    if chosen.busiest > chosen.most_received:
        # A relay that is busy with other bundles may cost more than it saves; then holders alone serve.
        direct = _balanced(bundles, part, nodes, topology, NEVER)
        if direct.busiest < chosen.busiest and direct.network_elements <= chosen.network_elements:
            chosen = direct
    routes = [
        Route(
            path=(ranks[share.holder], *(ranks[row] for row in share.chain)),
            blocks=bundles[share.bundle].blocks,
            share=(share.lo, share.hi),
        )
        for share in chosen.shares
    ]
    return tuple(sorted(routes, key=lambda route: (route.path, route.blocks, route.share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balanced:
    """Shares, what the busiest sender and receiver carry, and what crosses between nodes."""

    shares: list[Share]
    busiest: int
    most_received: int
    network_elements: int


def _balanced(
    bundles: list[Bundle], part: Partition, nodes: list[int], topology: Topology, relay_elements: int
) -> _Balanced:
    loads = Loads(len(nodes), nodes, _costs(topology))
    shares = assign(bundles, loads, relay_elements)
    most_received = loads.most_received(shares)
    levelling = Levelling.of(shares, bundles, part, loads, floor=most_received, relay_elements=relay_elements)
    return _Balanced(
        shares=levelling.run(),
        busiest=max(loads.rows, default=0),
        most_received=most_received,
        network_elements=sum(loads.node_out.values()),
    )


def _costs(topology: Topology) -> tuple[int, int]:
    """Whole-number costs of a byte within a node and between nodes, the dearer one 1000."""
    times = 1 / topology.node.bytes_per_s, 1 / topology.network.bytes_per_s
    near, far = (max(1, round(1000 * time / max(times))) for time in times)
    return near, far
