"""Which chain of one model-stage waits for which of another: release before acquire, unless that is circular.

Two chains of different model-stages overlap where one makes shards on ranks on which the other frees some:
for a while both old and new state would lie there. The one that frees goes first. Where each frees what the
other takes, the order of stages decides: generation, inference, training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from nereus.emu.chains import Chain
from nereus.emu.layout import Rank
from nereus.emu.unit import UnitId

STAGE_ORDER = {"generation": 0, "inference": 1, "training": 2}
Reason = Literal["resource", "source"]
ChainEdge = tuple[int, int, Reason]  # chain `first` before chain `then`


def precedence(chains: Sequence[Chain]) -> tuple[ChainEdge, ...]:
    """Edges between chains, sorted. `source`: the first reads what the other ends. `resource`: see above.

    Resource edges are left out where they would close a circle: there, old and new state meet.
    """
    hard = _source_edges(chains)
    keys = [_key(chain) for chain in chains]
    wants = _wants(chains, keys)
    if not hard and not any(wants):
        return ()
    before: list[set[int]] = [set() for _ in chains]
    for first, then in hard:
        before[then].add(first)
    place = {number: at for at, number in enumerate(_order(keys, before, wants))}
    soft = {(j, i) for i, wanted in enumerate(wants) for j in wanted if place[j] < place[i]}
    return tuple(sorted([(i, j, "source") for i, j in hard] + [(i, j, "resource") for i, j in soft - hard]))


def _source_edges(chains: Sequence[Chain]) -> frozenset[tuple[int, int]]:
    """(reader, ender) where a chain reads a unit of another stage that another chain ends."""
    readers: list[tuple[int, UnitId]] = [
        (number, unit.id)
        for number, chain in enumerate(chains)
        if chain.reads and chain.reads[0].id.model_stage != chain.makes[0].id.model_stage
        for unit in chain.reads
    ]
    if not readers:
        return frozenset()
    ender = {unit.id: number for number, chain in enumerate(chains) for unit in chain.ends}
    return frozenset((number, ender[unit]) for number, unit in readers if unit in ender)


Key = tuple[bool, int, str]


def _key(chain: Chain) -> Key:
    """Chains that only free come first, then stages in their order, then names."""
    return bool(chain.makes), STAGE_ORDER.get(chain.model_stage.rpartition(".")[2], 3), chain.id


def _wants(chains: Sequence[Chain], keys: Sequence[Key]) -> list[set[int]]:
    """For every chain, those of other model-stages that free ranks on which it makes shards."""
    stage = [chain.model_stage for chain in chains]
    enders: dict[Rank, tuple[int, ...]] = {}
    for number, chain in enumerate(chains):
        for unit in chain.ends:
            for rank in unit.layout.ranks:
                enders[rank] = (*enders.get(rank, ()), number)
    wants: list[set[int]] = []
    for number, chain in enumerate(chains):
        met = {enders.get(rank, ()) for unit in chain.makes for rank in unit.layout.ranks}
        mine = stage[number]
        wants.append({other for others in met for other in others if stage[other] != mine})
    for i, wanted in enumerate(wants):
        if wanted:
            wanted.difference_update([j for j in wanted if i in wants[j] and keys[i] < keys[j]])
    return wants


def _order(keys: Sequence[Key], before: list[set[int]], wants: list[set[int]]) -> list[int]:
    """All chains, each after those `before` it and, unless that is circular, after those that it wants."""
    is_open = [False] * len(keys)
    out: dict[int, None] = {}  # an ordered set

    def earlier(number: int) -> Iterator[int]:
        yield from sorted(before[number], key=keys.__getitem__)
        # A wanted chain that must itself come after an open one is part of a circle.
        yield from (
            j
            for j in sorted(wants[number], key=keys.__getitem__)
            if not any(is_open[hard] for hard in before[j])
        )

    for root in sorted(range(len(keys)), key=keys.__getitem__):
        stack = [] if root in out else [(root, earlier(root))]
        while stack:
            number, rest = stack[-1]
            is_open[number] = True
            following = next((j for j in rest if j not in out and not is_open[j]), None)
            if following is not None:
                stack.append((following, earlier(following)))
                continue
            stack.pop()
            is_open[number] = False
            out[number] = None
    return list(out)
