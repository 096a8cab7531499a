"""Which chain of one model-stage waits for which of another: release before acquire, unless that is circular.

Two chains of different model-stages overlap where one makes shards on ranks on which the other frees some:
for a while both old and new state would lie there. The one that frees goes first. Where each frees what the
other takes, the order of stages decides: generation, inference, training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from nereus.emu.chains import Chain
from nereus.emu.footprint import Footprint, footprint
from nereus.emu.unit import UnitId

STAGE_ORDER = {"generation": 0, "inference": 1, "training": 2}
Reason = Literal["resource", "source"]
ChainEdge = tuple[int, int, Reason]  # chain `first` before chain `then`
Pair = tuple[int, int]  # the same without its reason


def precedence(chains: Sequence[Chain], lie: Footprint | None = None) -> tuple[ChainEdge, ...]:
    """Edges between chains, sorted. `source`: the first reads what the other ends. `resource`: see above.

    Resource edges are left out where they would close a circle: there, old and new state meet. `lie` is the
    footprint of the chains, where it is known.
    """
    hard = _source_edges(chains)
    at_key = _places(_by_key(chains))
    soft = _releases_first(chains, lie or footprint(chains), at_key)
    if hard or not {i for i, _ in soft}.isdisjoint({j for _, j in soft}):  # else there is no circle
        soft = _without_circles(at_key, hard, soft)
    edges: list[ChainEdge] = [(i, j, "resource") for i, j in soft if not hard or (i, j) not in hard]
    return tuple(sorted([*edges, *((i, j, "source") for i, j in hard)])) if hard else tuple(edges)


def is_acyclic(num: int, edges: Iterable[Pair]) -> bool:
    """Whether edges between so many nodes close no circle."""
    waits = [0] * num
    then_of: list[list[int]] = [[] for _ in range(num)]
    for first, then in edges:
        waits[then] += 1
        then_of[first].append(then)
    ready = [number for number, count in enumerate(waits) if count == 0]
    for number in ready:  # grows while it is walked
        for then in then_of[number]:
            waits[then] -= 1
            if waits[then] == 0:
                ready.append(then)
    return len(ready) == num


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


def _by_key(chains: Sequence[Chain]) -> list[int]:
    """Chains that only free come first, then stages in their order, then names."""
    order = {name: _stage_order(name) for name in {chain.model_stage for chain in chains}}
    keys = [(bool(chain.makes), order[chain.model_stage], chain.id) for chain in chains]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _stage_order(model_stage: str) -> int:
    return STAGE_ORDER.get(model_stage.rpartition(".")[2], 3)


def _releases_first(chains: Sequence[Chain], lie: Footprint, at_key: Sequence[int]) -> list[Pair]:
    """(giver, taker) for chains of different model-stages, where one frees ranks on which the other makes
    shards; sorted. Where each does, the one of the lower place `at_key` goes first.
    """
    ends, makes = lie.ends, lie.makes
    if not len(ends.ranks) or not len(makes.ranks):
        return []
    names = {name: at for at, name in enumerate(dict.fromkeys([chain.model_stage for chain in chains]))}
    stage = np.array([names[chain.model_stage] for chain in chains], dtype=np.int64)
    # [model-stage, rank] the chain that frees it there: units of one model-stage share no rank.
    frees = np.full((len(names), lie.num_ranks), -1)
    frees[stage[ends.chains], ends.ranks] = ends.chains
    givers = frees[:, makes.ranks]
    met = (givers >= 0) & (np.arange(len(names))[:, None] != stage[makes.chains])
    takers = np.broadcast_to(makes.chains, met.shape)
    pairs = givers[met] * len(chains) + takers[met]
    pairs = np.sort(pairs[np.diff(pairs, prepend=-1) != 0])  # neighbours mostly meet the same
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]
    if not len(pairs):
        return []
    giver, taker = np.divmod(pairs, len(chains))
    reverse = taker * len(chains) + giver
    mutual = pairs[np.searchsorted(pairs, reverse).clip(max=len(pairs) - 1)] == reverse
    if mutual.any():
        place = np.array(at_key)
        first = ~mutual | (place[giver] < place[taker])
        giver, taker = giver[first], taker[first]
    return list(zip(giver.tolist(), taker.tolist(), strict=True))


def _without_circles(at_key: Sequence[int], hard: Iterable[Pair], soft: Sequence[Pair]) -> list[Pair]:
    """The soft edges that agree with one order of all chains, which keeps as many as it can: all, where there
    is no circle.
    """
    before: list[list[int]] = [[] for _ in at_key]
    wants: list[list[int]] = [[] for _ in at_key]
    for edges, given in ((hard, before), (soft, wants)):
        for first, then in sorted([(at_key[i], at_key[j]) for i, j in edges]):
            given[then].append(first)
    at = _places(_order(before, wants))
    place = [at[key] for key in at_key]
    return [(i, j) for i, j in soft if place[i] < place[j]]


def _places(order: Sequence[int]) -> list[int]:
    """The place of every number in an order of all of them."""
    out = [0] * len(order)
    for at, number in enumerate(order):
        out[number] = at
    return out


def _order(before: list[list[int]], wants: list[list[int]]) -> list[int]:
    """All chains, each after those `before` it and, unless that is circular, after those that it wants.

    Chains are numbered in the order in which they come where nothing else decides; both lists are in it.
    """
    is_new, is_open = [True] * len(before), [False] * len(before)
    out: list[int] = []

    def open_with(number: int) -> tuple[int, Iterator[int], Iterator[int]]:
        is_new[number], is_open[number] = False, True
        return number, iter(before[number]), iter(wants[number])

    for root in range(len(before)):
        stack = [open_with(root)] if is_new[root] else []
        while stack:
            number, hard, soft = stack[-1]
            for j in hard:
                if is_new[j]:
                    stack.append(open_with(j))
                    break
            else:
                for j in soft:
                    # A wanted chain that must itself come after an open one is part of a circle.
                    if is_new[j] and not (before[j] and any(is_open[other] for other in before[j])):
                        stack.append(open_with(j))
                        break
                else:
                    stack.pop()
                    is_open[number] = False
                    out.append(number)
    return out
