"""Which rank takes which position of the new units, so that most bytes stay where they are.

An assignment problem on overlap bytes: position against rank, weight = bytes that the rank already holds of
what the position needs. On one node it is solved at once; on several, tensor-parallel groups are first
assigned to nodes (their collectives must not cross the network), then positions to ranks inside each node.
Ties keep the rank that the caller named. Resulting groups are often not ascending in rank, so nothing may
ever derive a position from sorted ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from nereus.emu.layout import Rank
from nereus.emu.partition import Bools, Ints, Partition, cut_of
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit

Placement = Literal["max_overlap", "as_given"]
Floats = NDArray[np.float64]
Group = list[int]  # positions of one tensor-parallel group


def holdings(part: Partition, units: Sequence[Unit], ranks: Sequence[Rank]) -> Bools:
    """[ranks, blocks]: what each rank holds under these units."""
    row = {rank: index for index, rank in enumerate(ranks)}
    out = np.zeros((len(ranks), len(part.blocks)), dtype=bool)
    for unit in units:
        out[[row[rank] for rank in unit.layout.ranks]] = part.held[cut_of(unit.layout)]
    return out


def place(
    part: Partition,
    old: Sequence[Unit],
    new: Sequence[Unit],
    topology: Topology,
    *,
    pinned: Collection[Rank] = (),
    lost: Collection[Rank] = (),
    also: Callable[[Sequence[Rank]], Floats] | None = None,
) -> tuple[Unit, ...]:
    """The new units on the same ranks as given, permuted for the largest overlap with the old units.

    A tensor-parallel group with a rank of `pinned` stays as given; `lost` ranks hold nothing. A group larger
    than any node, or one that the nodes' remaining ranks cannot hold, takes what is left, across nodes.
    `also` gives for ranks the overlap [positions, ranks] of another state that moves along, in elements of
    this one.
    """
    positions = [rank for unit in new for rank in unit.layout.ranks]
    groups = _groups(new)
    free = [group for group in groups if not any(positions[i] in pinned for i in group)]
    if not free:
        return tuple(new)
    ranks = sorted(positions[i] for group in free for i in group)
    everyone = sorted({rank for unit in old for rank in unit.layout.ranks} | set(ranks))
    have = holdings(part, old, everyone)
    have[[rank in lost for rank in everyone]] = False
    weight = _weights(part, have[[everyone.index(rank) for rank in ranks]], new, ranks, positions)
    if also is not None:
        weight += also(ranks) * (len(positions) + 1)
    chosen = dict(enumerate(positions))
    nodes = topology.nodes_of(ranks)
    for index, column in _better(weight, _assign(weight, free, nodes), _given(free, positions, ranks), nodes):
        chosen[index] = ranks[column]
    out, start = [], 0
    for unit in new:
        size = unit.layout.world_size
        taken = tuple(chosen[i] for i in range(start, start + size))
        out.append(unit.with_layout(unit.layout.with_ranks(taken)))
        start += size
    return tuple(out)


def _given(groups: list[Group], positions: list[Rank], ranks: list[Rank]) -> list[list[tuple[int, int]]]:
    """The placement as the caller gave it: (position, column) by group."""
    column = {rank: index for index, rank in enumerate(ranks)}
    return [[(index, column[positions[index]]) for index in group] for group in groups]


def _better(
    weight: Floats, found: list[tuple[int, int]], given: list[list[tuple[int, int]]], nodes: list[int]
) -> list[tuple[int, int]]:
    """What was found, unless the given placement also keeps groups inside nodes and overlaps more.

    Assigning groups to nodes weighs them one by one, so that two groups may count on the same rank.
    """
    pairs = [pair for group in given for pair in group]
    inside = all(len({nodes[column] for _, column in group}) == 1 for group in given)
    if inside and sum(weight[pair] for pair in pairs) > sum(weight[pair] for pair in found):
        return pairs
    return found


def _groups(units: Sequence[Unit]) -> list[Group]:
    out: list[Group] = []
    start = 0
    for unit in units:
        layout = unit.layout
        out += [
            list(range(first, first + layout.tp))
            for first in range(start, start + layout.world_size, layout.tp)
        ]
        start += layout.world_size
    return out


def _weights(
    part: Partition, have: Bools, new: Sequence[Unit], ranks: list[Rank], positions: list[Rank]
) -> Floats:
    """[positions, ranks] overlap in elements, scaled so that one element outweighs every tie-break.

    Exact in float64 up to 2^53, thus for 10^12 elements a rank and 9,000 positions.
    """
    column = {rank: index for index, rank in enumerate(ranks)}
    need = np.concatenate([part.held[cut_of(unit.layout)] for unit in new])
    size: Ints = part.num_elements
    weight: Floats = (need * size.astype(np.float64)) @ have.T.astype(np.float64) * (len(positions) + 1)
    for index, rank in enumerate(positions):
        if rank in column:
            weight[index, column[rank]] += 1
    return weight


def _solve(weight: Floats, rows: list[int], columns: list[int]) -> list[tuple[int, int]]:
    chosen_rows, chosen_columns = linear_sum_assignment(weight[np.ix_(rows, columns)], maximize=True)
    return [(rows[i], columns[j]) for i, j in zip(chosen_rows, chosen_columns, strict=True)]


def _assign(weight: Floats, groups: list[Group], nodes: list[int]) -> list[tuple[int, int]]:
    """(position, column) for every position of the groups."""
    members: dict[int, list[int]] = defaultdict(list)
    for column, node in enumerate(nodes):
        members[node].append(column)
    if len(members) == 1:
        return _solve(weight, [i for group in groups for i in group], list(range(len(nodes))))
    hosted, homeless = _host(weight, groups, members)
    out: list[tuple[int, int]] = []
    left: list[int] = []
    for node, columns in members.items():
        pairs = _solve(weight, hosted[node], columns) if hosted[node] else []
        out += pairs
        taken = {column for _, column in pairs}
        left += [column for column in columns if column not in taken]
    if homeless:
        out += _solve(weight, homeless, left)
    return out


def _host(
    weight: Floats, groups: list[Group], members: dict[int, list[int]]
) -> tuple[dict[int, list[int]], list[int]]:
    """Positions hosted by each node, and the positions of groups that no node can hold.

    Larger groups choose first. A node's worth to a group is what its best ranks hold of each position.
    """
    room = {node: len(columns) for node, columns in members.items()}
    hosted: dict[int, list[int]] = {node: [] for node in members}
    homeless: list[int] = []
    best = np.array([weight[:, columns].max(axis=1) for columns in members.values()])  # [nodes, positions]
    order = {node: index for index, node in enumerate(members)}
    for size in sorted({len(group) for group in groups}, reverse=True):
        same = [group for group in groups if len(group) == size]
        slots = [node for node in members for _ in range(room[node] // size)]
        if slots:
            worth = best[:, np.array(same)].sum(axis=2).T  # [groups, nodes]
            rows, columns = linear_sum_assignment(worth[:, [order[node] for node in slots]], maximize=True)
        else:
            rows = columns = np.zeros(0, dtype=np.int64)
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
            hosted[slots[j]] += same[i]
            room[slots[j]] -= size
        placed = set(rows.tolist())
        homeless += [p for i, group in enumerate(same) if i not in placed for p in group]
    return hosted, homeless
