"""From which units each new one is copied: from all that lie on its ranks, else from one, evenly dealt.

New units of a model-stage that had none may lie where units of another stage hold the same weights: read
together, what a rank holds already is not sent to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nereus.emu.operations import Units
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit

Dealt = list[tuple[Units, list[Unit]]]


def deal(units: Sequence[Unit], sources: Units, topology: Topology | None) -> Dealt:
    """Sources and the units copied from them; every unit appears once, a source perhaps several times."""
    together, apart = _where_they_lie(units, sources)
    return together + _evenly(apart, sources, topology)


def _where_they_lie(units: Sequence[Unit], sources: Units) -> tuple[Dealt, list[Unit]]:
    """Units and sources that share ranks, directly or through others; and the units that share none."""
    holder = {rank: number for number, source in enumerate(sources) for rank in source.layout.ranks}
    group_of: dict[int, tuple[list[int], list[Unit]]] = {}
    groups: list[tuple[list[int], list[Unit]]] = []
    apart: list[Unit] = []
    for unit in units:
        if holder.keys().isdisjoint(unit.layout.ranks):
            apart.append(unit)
            continue
        touched = sorted({holder[rank] for rank in unit.layout.ranks if rank in holder})
        met = list({id(group_of[i]): group_of[i] for i in touched if i in group_of}.values())
        numbers = sorted({*touched, *(i for group in met for i in group[0])})
        joined = (numbers, [*(other for group in met for other in group[1]), unit])
        groups = [group for group in groups if not any(group is other for other in met)] + [joined]
        group_of.update(dict.fromkeys(numbers, joined))
    return [(tuple(sources[i] for i in numbers), members) for numbers, members in groups], apart


def _evenly(units: list[Unit], sources: Units, topology: Topology | None) -> Dealt:
    """Give every unit a source, on its own node where one is to be had, none more than an even share."""
    share = -(-len(units) // len(sources))
    near: dict[int, list[int]] = defaultdict(list)
    if topology is not None:
        for number, source in enumerate(sources):
            near[topology.node_of(source.layout.ranks[0])].append(number)
    given: list[list[Unit]] = [[] for _ in sources]
    spare = 0
    for unit in units:
        local = near.get(topology.node_of(unit.layout.ranks[0]), []) if topology is not None else []
        while local and len(given[local[0]]) == share:
            local.pop(0)
        while len(given[spare]) == share:
            spare += 1
        given[local[0] if local else spare].append(unit)
    return [((source,), units) for source, units in zip(sources, given, strict=True) if units]
