"""The schedule of a transition: when each chain runs, what goes to the host, and the graph that keeps it so.

```
graph ─▶ problem ─▶ certificate (with spills, where no order fits) ─▶ timeline ─▶ resource edges ─▶ graph
```
Why the edges suffice, however long the operations really take: take a bin and any moment, and of the tasks
started there the one that the timeline starts last. Its edges say that enough has been released for all that
the timeline had started there by then, and what has started now is a part of that. So no execution that
respects the edges exceeds the memory. They point forward in time, so they close no circle. Every rank takes
the chains that it is part of in the one order of the timeline (`order`, `of_rank`): no two ranks can wait for
each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nereus.emu.chain_time import Seconds, estimated
from nereus.emu.graph import Spill, TransitionGraph
from nereus.emu.layout import Rank
from nereus.emu.list_schedule import Timeline, shortest
from nereus.emu.live_spills import LiveSpills
from nereus.emu.precedence import ChainEdge
from nereus.emu.schedule_problem import Problem, Room, problem_of
from nereus.emu.shard_bytes import Sizes
from nereus.emu.spilling import with_spills
from nereus.emu.topology import Topology


class Slot(NamedTuple):
    """A chain, or a spill of one, in time. Seconds count from the beginning of the transition."""

    chain: int
    spill: Spill | None
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When everything happens, sorted by start, and the graph whose edges keep memory within its caps.

    `tight` are ranks where old and new state do not fit together; without any, all chains may run in shadow
    mode in one transaction. `peak_bytes` is the most model state on each rank that was tight by its room.
    """

    graph: TransitionGraph
    slots: tuple[Slot, ...]
    tight: frozenset[Rank]
    peak_bytes: Mapping[Rank, int] = field(hash=False)

    @property
    def makespan_s(self) -> float:
        """Predicted duration."""
        return max((slot.end_s for slot in self.slots), default=0.0)

    @property
    def order(self) -> tuple[str, ...]:
        """Ids of the chains in the one order in which all ranks take them."""
        return tuple(self.graph.chains[slot.chain].id for slot in self.slots if slot.spill is None)

    def of_rank(self, rank: Rank) -> tuple[str, ...]:
        """The chains that a rank takes part in, in order."""
        return tuple(
            chain.id
            for chain in (self.graph.chains[slot.chain] for slot in self.slots if slot.spill is None)
            if any(rank in unit.layout.ranks for unit in (*chain.reads, *chain.ends, *chain.makes))
        )

    @property
    def spilled_bytes(self) -> int:
        """Bytes that pass through host memory."""
        return sum(slot.spill.bytes for slot in self.slots if slot.spill is not None)


def schedule(
    graph: TransitionGraph,
    sizes: Sizes,
    room: Room,
    topology: Topology,
    seconds: Seconds | None = None,
    *,
    tries: int | None = None,
    spills: LiveSpills = (),
) -> Schedule:
    """Schedule a graph; `seconds` times its chains, by default roughly, by their largest shards.

    Deterministic. Compares `tries` orders: by default up to 256, fewer of many tasks, one above 64. The
    schedule finds its own spills where the room is short and memory is freed as operations end; those given,
    of a transition that frees it at its commit, come before whatever is made on their ranks. Raises
    Infeasible when the target exceeds a rank's memory, or a host's where old shards must go there.
    """
    problem = problem_of(graph, sizes, room, seconds or estimated(sizes, topology))
    problem, sequences = with_spills(problem, graph, room, topology)
    if spills:
        problem = problem.with_spills_first(spills, room)
    timeline = shortest(problem, sequences, tries=tries)
    tasks = problem.tasks
    listed = sorted(zip(timeline.start_s, timeline.end_s, range(len(tasks)), strict=True))
    slots = tuple([Slot(tasks[i].chain, tasks[i].spill, start_s, end_s) for start_s, end_s, i in listed])
    return Schedule(
        graph=_with_edges(graph, problem, timeline),
        slots=slots,
        tight=frozenset(
            rank for ranks in (*problem.bins, *(spill.ranks for _, spill in spills)) for rank in ranks
        ),
        peak_bytes=_peaks(problem, timeline),
    )


def _with_edges(graph: TransitionGraph, problem: Problem, timeline: Timeline) -> TransitionGraph:
    """The graph with the edges that memory needs, and nodes for what goes to the host."""
    num_chains = len(graph.chains)
    edges: set[ChainEdge] = {edge for edge in graph.edges if edge[2] == "source"}
    spill_edges: set[tuple[int, int]] = set()
    for number, task in enumerate(problem.tasks):
        if task.after:
            spill_edges |= {(other - num_chains, number) for other in task.after if other >= num_chains}
    for releaser, acquirer in _needed_releases(problem, timeline):
        if releaser >= num_chains:
            spill_edges.add((releaser - num_chains, acquirer))
        elif (releaser, acquirer, "source") not in edges:
            edges.add((releaser, acquirer, "resource"))
    spills = [(task.chain, task.spill) for task in problem.tasks if task.spill is not None]
    return graph.with_edges(edges, spills, spill_edges)


def _needed_releases(problem: Problem, timeline: Timeline) -> set[tuple[int, int]]:
    """(releaser, acquirer): the earliest releases that make room for all that a bin has started by then."""
    needed: set[tuple[int, int]] = set()
    if not problem.bins:
        return needed
    tasks, level = problem.tasks, list(problem.used)
    givers: list[list[tuple[int, int]]] = [[] for _ in problem.bins]
    for _, releaser in sorted([(timeline.end_s[i], i) for i, task in enumerate(tasks) if task.releases]):
        for place, amount in tasks[releaser].releases:
            givers[place].append((releaser, amount))
    for _, acquirer in sorted([(timeline.start_s[i], i) for i, task in enumerate(tasks) if task.acquires]):
        for place, amount in tasks[acquirer].acquires:
            level[place] += amount
            missing = level[place] - problem.cap[place]
            for releaser, freed in givers[place]:
                if missing <= 0:
                    break
                needed.add((releaser, acquirer))
                missing -= freed
    return needed


def _peaks(problem: Problem, timeline: Timeline) -> dict[Rank, int]:
    """The most that lies on every tight rank at any moment; what ends at a moment is gone at that moment."""
    if not problem.bins:
        return {}
    peak, level = list(problem.used), list(problem.used)
    tasks = problem.tasks
    ends = [(timeline.end_s[i], False, i) for i, task in enumerate(tasks) if task.releases]
    starts = [(timeline.start_s[i], True, i) for i, task in enumerate(tasks) if task.acquires]
    for _, begins, number in sorted(ends + starts):
        if begins:
            for place, amount in tasks[number].acquires:
                level[place] += amount
                peak[place] = max(peak[place], level[place])
        else:
            for place, amount in tasks[number].releases:
                level[place] -= amount
    return {rank: peak[place] for place, ranks in enumerate(problem.bins) for rank in ranks}
