"""What the scheduler sees of a transition: tasks that take links and memory, and ranks grouped into bins.

A task acquires the memory of the shards it makes when it starts and releases that of the shards it ends when
it is done. Each rank sends in one task and receives in one task at a time. Memory is looked at only where
old and new state do not fit together (*tight* ranks); tight ranks that go through the same changes form one
*bin*, whose numbers are those of each of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, repeat
from typing import NamedTuple, TypeVar

import numpy as np

from nereus.emu.chain_time import Estimate, Seconds
from nereus.emu.chains import Chain
from nereus.emu.footprint import Entries, Ints, ranks_of
from nereus.emu.graph import Spill, TransitionGraph
from nereus.emu.layout import Rank
from nereus.emu.shard_bytes import Sizes, bytes_of
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId
from nereus.errors import Infeasible, explain

Amounts = tuple[tuple[int, int], ...]  # (bin, bytes on each of its ranks)
RankMask = int  # bit r is rank r
SHORTEST_S = 1e-6
_BITS = np.array([1 << bit for bit in range(8)], dtype=np.uint8)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory for model state: `cap_bytes` on a rank (`cap_by_rank` where it differs), and on the hosts.

    A spill to pinned host memory and back runs at `host_bytes_per_s` a rank; a node has room for
    `host_bytes_per_node` of it.
    """

    cap_bytes: int
    cap_by_rank: Mapping[Rank, int] = field(default_factory=dict)
    host_bytes_per_node: int = 1 << 40
    host_bytes_per_s: float = 25e9


class Task(NamedTuple):
    """One chain, or one spill. `sends`, `receives` and `copies` are the ranks whose links it takes."""

    chain: int
    seconds: float
    sends: RankMask = 0
    receives: RankMask = 0
    copies: RankMask = 0
    acquires: Amounts = ()
    releases: Amounts = ()
    after: tuple[int, ...] = ()
    spill: Spill | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tasks, and for every bin its ranks, what lies there at the start, and what may."""

    tasks: tuple[Task, ...]
    bins: tuple[tuple[Rank, ...], ...] = ()
    used: tuple[int, ...] = ()
    cap: tuple[int, ...] = ()

    @cached_property
    def links(self) -> tuple[int, ...]:
        """For every task, the links that it takes as bits: of ranks that send, receive, and copy."""
        sends, receives = [task.sends for task in self.tasks], [task.receives for task in self.tasks]
        copies = [task.copies for task in self.tasks]
        width = max([*sends, *receives, *copies], default=0).bit_length()
        if any(copies):
            receives = [receive | copy << width for receive, copy in zip(receives, copies, strict=True)]
        return tuple([send | other << width for send, other in zip(sends, receives, strict=True)])

    @cached_property
    def net(self) -> tuple[dict[int, int], ...]:
        """For every task, by bin, what it adds for good."""
        out: list[dict[int, int]] = []
        for task in self.tasks:
            added = dict(task.acquires)
            for place, amount in task.releases:
                added[place] = added.get(place, 0) - amount
            out.append(added)
        return tuple(out)

    @cached_property
    def amounts(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """For every task, by bin, what it acquires and what it releases."""
        out: list[dict[int, tuple[int, int]]] = []
        for task in self.tasks:
            both = {place: (amount, 0) for place, amount in task.acquires}
            for place, amount in task.releases:
                both[place] = (both.get(place, (0, 0))[0], amount)
            out.append(both)
        return tuple(out)

    @cached_property
    def harmless(self) -> tuple[bool, ...]:
        """For every task, whether it leaves no bin fuller than it found it."""
        return tuple([not added or max(added.values()) <= 0 for added in self.net])

    @cached_property
    def released(self) -> tuple[int, ...]:
        """For every task, the bytes that it releases, one rank of each bin counted."""
        return tuple(
            [sum([amount for _, amount in task.releases]) if task.releases else 0 for task in self.tasks]
        )

    @cached_property
    def unlocks(self) -> tuple[tuple[int, ...], ...]:
        """For every task, those that come after it."""
        out: list[list[int]] = [[] for _ in self.tasks]
        for number, task in enumerate(self.tasks):
            for other in task.after:
                out[other].append(number)
        return tuple(map(tuple, out))

    @cached_property
    def mean_acquired(self) -> float:
        """Mean bytes of an acquisition."""
        amounts = [amount for task in self.tasks for _, amount in task.acquires]
        return sum(amounts) / max(1, len(amounts))

    def with_spill(self, number: int, place: int, units: tuple[UnitId, ...], room: Room) -> Problem:
        """Task `number` finds on the host what it would release in bin `place`; a new task takes it there."""
        task, ranks = self.tasks[number], self.bins[place]
        amount = dict(task.releases)[place]
        copied = Spill(units=units, ranks=ranks, rank_bytes=amount)
        spill = _copying(task.chain, copied, room)._replace(releases=((place, amount),))
        reader = task._replace(
            seconds=task.seconds + spill.seconds,
            releases=tuple(item for item in task.releases if item[0] != place),
            after=(*task.after, len(self.tasks)),
        )
        tasks = (*self.tasks[:number], reader, *self.tasks[number + 1 :], spill)
        return replace(self, tasks=tasks)

    def with_spills_first(self, spills: Sequence[tuple[int, Spill]], room: Room) -> Problem:
        """These spills, each of the shards that a chain ends, come before whatever is made on their ranks."""
        tasks = list(self.tasks)
        for chain, spill in spills:
            copying = _copying(chain, spill, room)
            for at, task in enumerate(tasks):
                if at == chain or task.receives & copying.copies:
                    seconds = task.seconds + (copying.seconds if at == chain else 0.0)
                    tasks[at] = task._replace(seconds=seconds, after=(*task.after, len(tasks)))
            tasks.append(copying)
        return replace(self, tasks=tuple(tasks))


def _copying(chain: int, spill: Spill, room: Room) -> Task:
    """The task that takes these shards of a chain to the host."""
    seconds = spill.rank_bytes / room.host_bytes_per_s
    return Task(chain=chain, seconds=seconds, copies=mask_of(spill.ranks), spill=spill)


def mask_of(ranks: Iterable[Rank]) -> RankMask:
    """The ranks as bits."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def problem_of(graph: TransitionGraph, sizes: Sizes, room: Room, seconds: Seconds) -> Problem:
    """The scheduling problem of a graph. Raises Infeasible when the target itself exceeds a rank's memory."""
    chains, lie = graph.chains, graph.footprint
    gone_units = [unit for chain in chains for unit in chain.ends]
    ended = _Bytes(lie.ends, bytes_of(gone_units, sizes))
    made = _Bytes(lie.makes, bytes_of([unit for chain in chains for unit in chain.makes], sizes))
    num_ranks = max(max(graph.before.ranks, default=0) + 1, lie.num_ranks)
    gone, come = (_load(one.lies.ranks, one.amounts, num_ranks) for one in (ended, made))
    stays = _staying(graph, gone_units)
    used = gone + _load(ranks_of(stays), bytes_of(stays, sizes), num_ranks)
    cap = np.full(num_ranks, room.cap_bytes, dtype=np.int64)
    for rank, limit in room.cap_by_rank.items():
        if rank < num_ranks:
            cap[rank] = limit
    _check_target(used - gone + come, cap)
    bins, acquires, releases = _bins(chains, ended, made, used, cap, np.flatnonzero(used + come > cap))
    first = [ranks[0] for ranks in bins]
    if isinstance(seconds, Estimate):
        durations = seconds.of_all(len(chains), lie, made.amounts)
    else:
        durations = [seconds(chain) if chain.makes else 0.0 for chain in chains]
    # Above zero, so that what a chain takes is never counted as freed at the same moment.
    above = [
        max(SHORTEST_S, value) if chain.makes else 0.0 for value, chain in zip(durations, chains, strict=True)
    ]
    sends, receives = (_masks(lies, len(chains), num_ranks) for lies in (lie.reads, lie.makes))
    after: list[tuple[int, ...]] = [()] * len(chains)
    for i, j in sorted([(i, j) for i, j, reason in graph.edges if reason == "source"]):
        after[j] += (i,)
    tasks = tuple(map(Task, range(len(chains)), above, sends, receives, repeat(0), acquires, releases, after))
    held, caps = (tuple(amounts[first].tolist()) for amounts in (used, cap))
    return Problem(tasks=tasks, bins=bins, used=held, cap=caps)


class _Bytes(NamedTuple):
    """The shards that chains end, or make: where they lie, and how large they are, entry by entry."""

    lies: Entries
    amounts: Ints


def _staying(graph: TransitionGraph, ended: Sequence[Unit]) -> Sequence[Unit]:
    """The units that no chain ends: those kept, and what chains leave that were added to a derived graph."""
    if len(graph.kept) + len(ended) == len(graph.before.units):
        return graph.kept
    gone = {unit.id for unit in ended}
    return [unit for unit in graph.before.units if unit.id not in gone]


def _masks(lies: Entries, num_chains: int, num_ranks: int) -> list[RankMask]:
    """The ranks of every chain as bits."""
    width = num_ranks // 8 + 1
    packed = np.zeros(num_chains * width, dtype=np.uint8)
    np.bitwise_or.at(packed, lies.chains * width + (lies.ranks >> 3), _BITS[lies.ranks & 7])
    return [int.from_bytes(row, "little") for row in packed.view(np.dtype((np.void, width))).tolist()]


def _load(ranks: Ints, amounts: Ints, num_ranks: int) -> Ints:
    """Bytes on every rank."""
    out = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(out, ranks, amounts)
    return out


def _check_target(used: Ints, cap: Ints) -> None:
    over = used - cap
    if (over > 0).any():
        rank = int(over.argmax())
        raise Infeasible(
            explain(
                "cannot schedule the transition",
                values=f"rank {rank} would hold {int(used[rank])} bytes of model state of {int(cap[rank])}",
                rule="the state after the transition must fit on every rank",
                remedy=f"free {int(over[rank])} bytes there, or plan for less",
            )
        )


def _bins(
    chains: Sequence[Chain], ended: _Bytes, made: _Bytes, used: Ints, cap: Ints, tight: Ints
) -> tuple[tuple[tuple[Rank, ...], ...], list[Amounts], list[Amounts]]:
    """Group tight ranks by what happens on them; and every chain's acquisitions and releases by bin."""
    if not len(tight):
        return (), [()] * len(chains), [()] * len(chains)
    names = {name: at for at, name in enumerate(dict.fromkeys([chain.model_stage for chain in chains]))}
    stage = np.array([names[chain.model_stage] for chain in chains], dtype=np.int64)
    column = np.full(len(used), -1)
    column[tight] = np.arange(len(tight))
    # [model-stage and whether made, tight rank]: units of one model-stage share no rank.
    who = np.full((2 * len(names), len(tight)), -1)
    amount = np.zeros_like(who)
    for side, one in enumerate((ended, made)):
        there = np.flatnonzero(column[one.lies.ranks] >= 0)
        at, number = column[one.lies.ranks[there]], one.lies.chains[there]
        who[2 * stage[number] + side, at] = number
        amount[2 * stage[number] + side, at] = one.amounts[there]
    first, bin_of = _alike(np.vstack((used[tight], cap[tight], who, amount)))
    order = np.argsort(bin_of, kind="stable")
    bins = tuple(_cut(tuple(tight[order].tolist()), bin_of[order], len(first)))
    who, amount = who[:, first].T, amount[:, first].T
    releases, acquires = (_by_chain(who[:, side::2], amount[:, side::2], len(chains)) for side in (0, 1))
    return bins, acquires, releases


def _by_chain(who: Ints, amount: Ints, num_chains: int) -> list[Amounts]:
    """(bin, bytes) for every chain, in order, from [bin, model-stage] which chain takes or frees how much."""
    place, row = np.nonzero(who >= 0)
    number, size = who[place, row], amount[place, row]
    order = np.argsort(number, kind="stable")
    pairs = zip(place[order].tolist(), size[order].tolist(), strict=True)
    return _cut(tuple(pairs), number[order], num_chains)


def _cut(items: tuple[T, ...], group_of: Ints, num_groups: int) -> list[tuple[T, ...]]:
    """The items of every group, where those of one follow one another in order of the groups."""
    ends = np.searchsorted(group_of, np.arange(num_groups + 1)).tolist()
    return [items[lo:hi] for lo, hi in pairwise(ends)]


def _alike(columns: Ints) -> tuple[list[int], Ints]:
    """The first of every group of equal columns, in order, and the group of every column."""
    differs = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    starts = np.flatnonzero(np.concatenate(([True], differs)))  # neighbours are mostly alike
    rows = np.ascontiguousarray(columns[:, starts].T)
    data, width = rows.tobytes(), rows.itemsize * rows.shape[1]
    keys = [data[at : at + width] for at in range(0, len(data), width)]
    group_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    first = dict(zip(reversed(keys), reversed(starts.tolist()), strict=True))
    groups = np.repeat([group_of[key] for key in keys], np.diff(starts, append=columns.shape[1]))
    return [first[key] for key in group_of], groups


def host_bytes(problem: Problem, topology: Topology) -> dict[int, int]:
    """Bytes that spills put on the host of every node."""
    out: dict[int, int] = {}
    for task in problem.tasks:
        if task.spill is not None:
            for rank in task.spill.ranks:
                node = topology.node_of(rank)
                out[node] = out.get(node, 0) + task.spill.rank_bytes
    return out
