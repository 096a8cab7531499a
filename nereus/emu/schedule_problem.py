"""What the scheduler sees of a transition: tasks that take links and memory, and ranks grouped into bins.

A task acquires the memory of the shards it makes when it starts and releases that of the shards it ends when
it is done. Each rank sends in one task and receives in one task at a time. Memory is looked at only where
old and new state do not fit together (*tight* ranks); tight ranks that go through the same changes form one
*bin*, whose numbers are those of each of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain as joined

import numpy as np
from numpy.typing import NDArray

from nereus.emu.chain_time import Seconds
from nereus.emu.graph import Spill, TransitionGraph
from nereus.emu.layout import Rank
from nereus.emu.shard_bytes import Sizes
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId
from nereus.errors import Infeasible, explain

Amounts = tuple[tuple[int, int], ...]  # (bin, bytes on each of its ranks)
RankMask = int  # bit r is rank r
SHORTEST_S = 1e-6


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
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
    def harmless(self) -> tuple[bool, ...]:
        """For every task, whether it leaves no bin fuller than it found it."""
        return tuple(all(net <= 0 for net in added.values()) for added in self.net)

    @cached_property
    def released(self) -> tuple[int, ...]:
        """For every task, the bytes that it releases, one rank of each bin counted."""
        return tuple(sum(amount for _, amount in task.releases) for task in self.tasks)

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
        seconds = amount / room.host_bytes_per_s
        spill = Task(
            chain=task.chain,
            seconds=seconds,
            copies=mask_of(ranks),
            releases=((place, amount),),
            spill=Spill(units=units, ranks=ranks, rank_bytes=amount),
        )
        reader = replace(
            task,
            seconds=task.seconds + seconds,
            releases=tuple(item for item in task.releases if item[0] != place),
            after=(*task.after, len(self.tasks)),
        )
        tasks = (*self.tasks[:number], reader, *self.tasks[number + 1 :], spill)
        return replace(self, tasks=tasks)


def mask_of(ranks: Iterable[Rank]) -> RankMask:
    """The ranks as bits."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def _mask_of_units(units: Sequence[Unit]) -> RankMask:
    mask = 0
    for unit in units:
        ranks = unit.layout.ranks
        low, high = ranks[0], ranks[-1]
        if high - low + 1 == len(ranks) and ranks == tuple(range(low, high + 1)):
            mask |= ((1 << len(ranks)) - 1) << low  # the common case, at once
        else:
            mask |= mask_of(ranks)
    return mask


def problem_of(graph: TransitionGraph, sizes: Sizes, room: Room, seconds: Seconds) -> Problem:
    """The scheduling problem of a graph. Raises Infeasible when the target itself exceeds a rank's memory."""
    ended = [unit for chain in graph.chains for unit in chain.ends]
    made = [unit for chain in graph.chains for unit in chain.makes]
    num_ranks = max(graph.before.ranks, default=0) + 1
    used, gone, come = (_load(units, sizes, num_ranks) for units in (graph.before.units, ended, made))
    cap = np.full(num_ranks, room.cap_bytes, dtype=np.int64)
    for rank, limit in room.cap_by_rank.items():
        if rank < num_ranks:
            cap[rank] = limit
    _check_target(used - gone + come, cap)
    tight = np.flatnonzero(used + come > cap)
    bins, acquires, releases = _bins(graph, sizes, tight.tolist(), used, cap)
    first = [ranks[0] for ranks in bins]
    before: dict[int, list[int]] = {}
    for first_chain, then, reason in graph.edges:
        if reason == "source":
            before.setdefault(then, []).append(first_chain)
    tasks = tuple(
        Task(
            chain=number,
            # Above zero, so that what a chain takes is never counted as freed at the same moment.
            seconds=max(SHORTEST_S, seconds(chain)) if chain.makes else 0.0,
            sends=_mask_of_units(chain.reads),
            receives=_mask_of_units(chain.makes),
            acquires=tuple(sorted(acquires[number].items())),
            releases=tuple(sorted(releases[number].items())),
            after=tuple(sorted(before.get(number, ()))),
        )
        for number, chain in enumerate(graph.chains)
    )
    return Problem(tasks=tasks, bins=bins, used=tuple(used[first].tolist()), cap=tuple(cap[first].tolist()))


def _load(units: Sequence[Unit], sizes: Sizes, num_ranks: int) -> NDArray[np.int64]:
    """Bytes on every rank."""
    ranks = np.fromiter(joined.from_iterable(unit.layout.ranks for unit in units), dtype=np.int64)
    amounts = np.fromiter(joined.from_iterable(_sizes(units, sizes)), dtype=np.int64)
    out = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(out, ranks, amounts)
    return out


def _sizes(units: Sequence[Unit], sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """The sizes of every unit. Units of one model-stage and one cut are replicas: they are asked for once."""
    last: tuple[str, int, tuple[int, ...]] | None = None
    amounts: tuple[int, ...] = ()
    for unit in units:
        shape = (unit.id.model_stage, unit.layout.tp, unit.layout.layers)
        if shape != last:
            last, amounts = shape, sizes(unit)
        yield amounts


def _check_target(used: NDArray[np.int64], cap: NDArray[np.int64]) -> None:
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
    graph: TransitionGraph,
    sizes: Sizes,
    tight: list[Rank],
    used: NDArray[np.int64],
    cap: NDArray[np.int64],
) -> tuple[tuple[tuple[Rank, ...], ...], list[dict[int, int]], list[dict[int, int]]]:
    """Group tight ranks by what happens on them; and every chain's amounts by bin."""
    acquires: list[dict[int, int]] = [{} for _ in graph.chains]
    releases: list[dict[int, int]] = [{} for _ in graph.chains]
    if not tight:
        return (), acquires, releases
    events: dict[Rank, list[tuple[int, bool, int]]] = {rank: [] for rank in tight}
    for number, chain in enumerate(graph.chains):
        for makes, units in ((False, chain.ends), (True, chain.makes)):
            for unit in units:
                for rank, amount in zip(unit.layout.ranks, sizes(unit), strict=True):
                    if rank in events:
                        events[rank].append((number, makes, amount))
    members: dict[tuple[object, ...], list[Rank]] = {}
    for rank, happens in events.items():
        members.setdefault((int(used[rank]), int(cap[rank]), *happens), []).append(rank)
    bins = tuple(tuple(ranks) for ranks in members.values())
    for number, ranks in enumerate(bins):
        for chain_number, makes, amount in events[ranks[0]]:
            (acquires if makes else releases)[chain_number][number] = amount
    return bins, acquires, releases


def host_bytes(problem: Problem, topology: Topology) -> dict[int, int]:
    """Bytes that spills put on the host of every node."""
    out: dict[int, int] = {}
    for task in problem.tasks:
        if task.spill is not None:
            for rank in task.spill.ranks:
                node = topology.node_of(rank)
                out[node] = out.get(node, 0) + task.spill.rank_bytes
    return out
