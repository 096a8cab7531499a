"""Which routes of a plan are run as broadcasts: one message of a holder to several ranks, instead of several.

A relay chain is a broadcast. Routes by which one holder gives the same elements to several ranks are one,
too; where every rank of a set gives its part to all others these make up an all-gather. The bytes that reach
each rank are the same. A broadcast packs once and fills no chain, but a communicator over its ranks must be
made first, unless they are all that take part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nereus.emu.sources import Route

if TYPE_CHECKING:
    from nereus.emu.layout import Rank
    from nereus.emu.reshard import ReshardPlan

GROUP_S = 0.2  # to make a communicator of a few ranks; assumed, between the 0.05 s of gloo here and NCCL's
CHAIN_BUCKETS = 8  # parts into which a relay chain cuts what it passes on


def shared_routes(plan: ReshardPlan) -> Iterator[tuple[Route, bool]]:
    """The plan's routes, those of a broadcast joined to one: its root, then the others in ascending order."""
    if plan.limits.collectives == "never":
        yield from ((route, False) for route in plan.routes)
        return
    alike: dict[tuple[Rank, tuple[int, ...], tuple[int, int]], list[Route]] = defaultdict(list)
    for route in plan.routes:
        alike[route.path[0], route.blocks, route.share].append(route)
    sets: dict[tuple[Rank, ...], list[tuple[Route, list[Route]]]] = defaultdict(list)
    for (root, _, _), routes in alike.items():
        others = tuple(sorted(rank for route in routes for rank in route.path[1:]))
        joined = replace(routes[0], path=(root, *others))
        sets[tuple(sorted(joined.path))].append((joined, routes))
    everyone = tuple(sorted({rank for route in plan.routes for rank in route.path}))
    for members, found in sorted(sets.items()):
        pays = plan.limits.collectives == "always" or _pays(plan, members == everyone, found)
        for joined, routes in found:
            if len(members) > 2 and pays:
                yield joined, True
            else:
                yield from ((route, False) for route in routes)


def _pays(plan: ReshardPlan, is_everyone: bool, found: list[tuple[Route, list[Route]]]) -> bool:
    """Whether broadcasts among one set of ranks save more than their communicator costs.

    Saved are the fill of a chain, (hops - 1) / 8 of its bytes at the speed of a link, or the packing of all
    copies but one at the speed of memory.
    """
    saved = 0.0
    for joined, routes in found:
        size = joined.num_elements * plan.wire_bytes_per_element
        nodes = {plan.topology.node_of(rank) for rank in joined.path}
        link = plan.topology.node if len(nodes) == 1 else plan.topology.network
        relays = max(len(route.path) for route in routes) - 2
        saved += size * relays / CHAIN_BUCKETS / link.bytes_per_s
        saved += size * (len(routes) - 1) / plan.topology.memory.bytes_per_s
    return saved > (0.0 if is_everyone else GROUP_S)
