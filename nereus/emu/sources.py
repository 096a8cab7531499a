"""Who sends what to whom: a holder for every demanded block, and relays where copies are few.

Blocks with the same holders and the same receivers form a bundle. Each receiver of a bundle is fed by the
least-loaded holder, one on its own node where there is one. Where a bundle is demanded more often than it is
held, its receivers form chains: each passes on what it received, so that nobody sends more than one copy, and
a node that holds none fetches one copy from outside. Then load moves off the busiest senders, to other
holders or to relays, until the busiest sender is no busier than the busiest receiver, or no move helps.
Busy is bytes weighted by the time a byte takes on its link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from nereus.emu.balance import Bundle, Demand, Levelling, Loads, assign
from nereus.emu.layout import Rank
from nereus.emu.partition import Bools, Ints, Partition
from nereus.emu.topology import Topology


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


def _by_node(rows: Iterable[int], nodes: list[int]) -> dict[int, tuple[int, ...]]:
    out: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        out[nodes[row]].append(row)
    return {node: tuple(members) for node, members in out.items()}


def _deal(items: tuple[int, ...], num: int) -> list[tuple[int, ...]]:
    """`num` runs of nearly equal length."""
    base, extra = divmod(len(items), num)
    ends = list(accumulate(base + (i < extra) for i in range(num)))
    return [items[lo:hi] for lo, hi in zip([0, *ends], ends, strict=False)]


def _demands(number: int, bundle: Bundle, nodes: list[int], relay: bool) -> list[Demand]:
    """The chains of a bundle, inside nodes first."""
    holders = _by_node(bundle.holders, nodes)
    out: list[Demand] = []
    outside: list[tuple[int, ...]] = []
    for node, needers in _by_node(bundle.needers, nodes).items():
        near = holders.get(node, ())
        if not relay:
            out += [Demand(number, (row,), near or bundle.holders) for row in needers]
        elif not near:
            outside.append(needers)
        elif len(needers) > len(near):
            chains = _deal(needers, len(near))
            out += [Demand(number, chain, (row,)) for chain, row in zip(chains, near, strict=True)]
        else:
            out += [Demand(number, (row,), near) for row in needers]
    if len(outside) > len(bundle.holders):
        runs = _deal(tuple(range(len(outside))), len(bundle.holders))
        chains = [tuple(row for i in run for row in outside[i]) for run in runs]
        out += [Demand(number, chain, (row,)) for chain, row in zip(chains, bundle.holders, strict=True)]
    else:
        out += [Demand(number, chain, bundle.holders) for chain in outside]
    return out


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
    least `relay_elements` are relayed when they are demanded more often than held. Every remote block must be
    held by some rank.
    """
    nodes = topology.nodes_of(ranks)
    bundles = _bundles(have, remote, part.num_elements)
    demands = [
        demand
        for number, bundle in enumerate(bundles)
        for demand in _demands(number, bundle, nodes, bundle.num_elements >= relay_elements)
    ]
    loads = Loads(len(ranks), nodes, _costs(topology))
    floor = loads.most_received(demands, bundles)
    shares = assign(demands, bundles, loads)
    shares = Levelling.of(shares, bundles, part, loads, floor=floor, relay_elements=relay_elements).run()
    routes = [
        Route(
            path=(ranks[share.holder], *(ranks[row] for row in share.demand.chain)),
            blocks=bundles[share.demand.bundle].blocks,
            share=(share.lo, share.hi),
        )
        for share in shares
    ]
    return tuple(sorted(routes, key=lambda route: (route.path, route.blocks, route.share)))


def _costs(topology: Topology) -> tuple[int, int]:
    """Whole-number costs of a byte within a node and between nodes, the dearer one 1000."""
    times = 1 / topology.node.bytes_per_s, 1 / topology.network.bytes_per_s
    near, far = (max(1, round(1000 * time / max(times))) for time in times)
    return near, far
