"""Which old shards go to host memory where no order of the tasks fits: the cheapest that make one fit.

With every old shard on the host, each rank holds what is kept and what was made, never more than the state
after the transition. So if that fits and the hosts have room, some choice works.

Groups of tasks are taken out and renumbered, so that groups of one shape are one problem, solved once: at a
thousand GPUs the same few chains meet on every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.emu.certificate import SMALL, components, find_sequence
from nereus.emu.graph import TransitionGraph
from nereus.emu.schedule_problem import Problem, Room, Task, host_bytes
from nereus.emu.topology import Topology
from nereus.emu.unit import UnitId
from nereus.errors import Infeasible, explain

Sequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    """(task, bin) of every spill, and a sequence, in which the n-th spill is number `num_tasks + n`."""

    spills: tuple[tuple[int, int], ...]
    sequence: tuple[int, ...]


def with_spills(
    problem: Problem, graph: TransitionGraph, room: Room, topology: Topology
) -> tuple[Problem, Sequences]:
    """The problem with as many spills as it needs, and a feasible sequence of every component.

    Raises Infeasible when a host has too little memory for them.
    """
    groups = components(problem) if problem.bins else ()
    if len(groups) == 1:  # then nothing is gained by taking it out
        found = find_sequence(problem, groups[0], problem.used)
        if found is not None:
            return problem, (tuple(found),)
    sequences: list[tuple[int, ...]] = []
    solved: dict[Problem, _Solution] = {}
    original = problem
    for group in groups:
        alone, bins = _alone(original, group)
        if alone not in solved:
            solved[alone] = _solve(alone, room, fails=len(groups) == 1)
        solution, first = solved[alone], len(problem.tasks)
        numbers = [*group, *range(first, first + len(solution.spills))]
        for at, place in solution.spills:
            units = _units(problem, graph, group[at], bins[place])
            problem = problem.with_spill(group[at], bins[place], units, room)
        sequences.append(tuple(numbers[at] for at in solution.sequence))
    _check_host(problem, room, topology)
    return problem, tuple(sequences)


def _alone(problem: Problem, group: Sequence[int]) -> tuple[Problem, list[int]]:
    """The group as a problem of its own, without links and times, and its bins' numbers in the whole one."""
    place_of: dict[int, int] = {}
    number_of = {number: at for at, number in enumerate(group)}
    tasks = []
    for at, number in enumerate(group):
        task = problem.tasks[number]
        for place, _ in (*task.acquires, *task.releases):
            place_of.setdefault(place, len(place_of))
        acquires = tuple([(place_of[place], amount) for place, amount in task.acquires])
        releases = tuple([(place_of[place], amount) for place, amount in task.releases])
        after = tuple([number_of[other] for other in task.after])
        tasks.append(Task(chain=at, seconds=0.0, acquires=acquires, releases=releases, after=after))
    bins = list(place_of)
    alone = Problem(
        tasks=tuple(tasks),
        bins=tuple(tuple(range(len(problem.bins[place]))) for place in bins),
        used=tuple(problem.used[place] for place in bins),
        cap=tuple(problem.cap[place] for place in bins),
    )
    return alone, bins


def _solve(problem: Problem, room: Room, *, fails: bool) -> _Solution:
    """A sequence of all tasks, with spills where there is none without, as is known where it `fails`."""
    everything = range(len(problem.tasks))
    found = None if fails else find_sequence(problem, everything, problem.used)
    if found is None and len(everything) > SMALL:
        return _unblocked(problem)
    spills: list[tuple[int, int]] = []
    while found is None:
        number, place = _cheapest(problem, room)
        spills.append((number, place))
        problem = problem.with_spill(number, place, (), room)
        found = find_sequence(problem, range(len(problem.tasks)), problem.used)
    return _Solution(spills=tuple(spills), sequence=tuple(found))


def _cheapest(problem: Problem, room: Room) -> tuple[int, int]:
    """(task, bin): the cheapest spill after which a sequence exists, else the cheapest on the fullest bin."""
    choices = sorted(
        (amount * len(problem.bins[place]), number, place)
        for number, task in enumerate(problem.tasks)
        if task.spill is None
        for place, amount in task.releases
    )
    assert choices, "I13: with all old shards on the host every order fits"
    for _, number, place in choices:
        changed = problem.with_spill(number, place, (), room)
        if find_sequence(changed, range(len(changed.tasks)), changed.used, attempts=4) is not None:
            return number, place
    over = [used - cap for used, cap in zip(problem.used, problem.cap, strict=True)]
    for task in problem.tasks:
        for place, amount in task.acquires:
            over[place] += amount
    fullest = max({place for _, _, place in choices}, key=lambda place: (over[place], -place))
    return next((number, place) for _, number, place in choices if place == fullest)


def _unblocked(problem: Problem) -> _Solution:
    """A sequence for a large group, and the spills that it needs to go first.

    Tasks are taken as they fit, those that free most first. Where none fits, the one that the fewest bytes
    keep out is let in by spills, the cheapest shards of its bins.
    """
    group = range(len(problem.tasks))
    used, done = list(problem.used), set[int]()
    holds = {number: dict(problem.tasks[number].releases) for number in group}
    sequence: list[int] = []
    spills: list[tuple[int, int]] = []

    def short(number: int) -> list[tuple[int, int]]:
        """(bin, bytes) that the task lacks."""
        wanted = problem.tasks[number].acquires
        return [
            (place, used[place] + amount - problem.cap[place])
            for place, amount in wanted
            if used[place] + amount > problem.cap[place]
        ]

    while len(sequence) < len(group):
        ready = [n for n in group if n not in done and all(other in done for other in problem.tasks[n].after)]
        lacks = {number: short(number) for number in ready}
        number = min(ready, key=lambda n: (sum(b for _, b in lacks[n]), -sum(holds[n].values()), n))
        for place, missing in lacks[number]:
            for amount, other in sorted(
                (amounts[place], n) for n, amounts in holds.items() if n not in done and place in amounts
            ):
                if missing <= 0:
                    break
                spills.append((other, place))
                missing -= amount
                used[place] -= holds[other].pop(place)
        for place, amount in problem.tasks[number].acquires:
            used[place] += amount
        for place, amount in holds[number].items():
            used[place] -= amount
        done.add(number)
        sequence.append(number)
    first = range(len(group), len(group) + len(spills))
    return _Solution(spills=tuple(spills), sequence=(*first, *sequence))


def _units(problem: Problem, graph: TransitionGraph, number: int, place: int) -> tuple[UnitId, ...]:
    """The units whose shards the task releases in the bin."""
    ranks = set(problem.bins[place])
    ends = graph.chains[problem.tasks[number].chain].ends
    return tuple(unit.id for unit in ends if ranks & unit.ranks)


def _check_host(problem: Problem, room: Room, topology: Topology) -> None:
    for node, amount in host_bytes(problem, topology).items():
        if amount > room.host_bytes_per_node:
            raise Infeasible(
                explain(
                    "cannot schedule the transition",
                    values=f"node {node} would put {amount} bytes on its host, which has room for "
                    f"{room.host_bytes_per_node}",
                    rule="no order of the operations was found that fits the GPUs without it",
                    remedy=f"allow {amount - room.host_bytes_per_node} bytes more, or free GPU memory",
                )
            )
