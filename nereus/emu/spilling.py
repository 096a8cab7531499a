"""Which old shards go to host memory where no order of the tasks fits: the cheapest that make one fit.

With every old shard on the host, each rank holds what is kept and what was made, never more than the state
after the transition. So if that fits and the hosts have room, some choice works.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.emu.certificate import SMALL, components, find_sequence
from nereus.emu.graph import TransitionGraph
from nereus.emu.schedule_problem import Problem, Room, host_bytes
from nereus.emu.topology import Topology
from nereus.emu.unit import UnitId
from nereus.errors import Infeasible, explain

Sequences = tuple[tuple[int, ...], ...]


def with_spills(
    problem: Problem, graph: TransitionGraph, room: Room, topology: Topology
) -> tuple[Problem, Sequences]:
    """The problem with as many spills as it needs, and a feasible sequence of every component.

    Raises Infeasible when a host has too little memory for them.
    """
    sequences: list[tuple[int, ...]] = []
    for group in components(problem) if problem.bins else ():
        members = list(group)
        found = find_sequence(problem, members, problem.used)
        if found is None and len(group) > SMALL:
            found, chosen = _unblocked(problem, group)
            found[:0] = range(len(problem.tasks), len(problem.tasks) + len(chosen))
            for number, place in chosen:
                problem = problem.with_spill(number, place, _units(problem, graph, number, place), room)
        while found is None:
            number, place = _cheapest(problem, graph, room, members)
            members.append(len(problem.tasks))
            problem = problem.with_spill(number, place, _units(problem, graph, number, place), room)
            found = find_sequence(problem, members, problem.used)
        sequences.append(tuple(found))
    _check_host(problem, room, topology)
    return problem, tuple(sequences)


def _cheapest(
    problem: Problem, graph: TransitionGraph, room: Room, members: Sequence[int]
) -> tuple[int, int]:
    """(task, bin): the cheapest spill after which a sequence exists, else the cheapest on the fullest bin."""
    choices = sorted(
        (amount * len(problem.bins[place]), number, place)
        for number in members
        if problem.tasks[number].spill is None
        for place, amount in problem.tasks[number].releases
    )
    assert choices, "I13: with all old shards on the host every order fits"
    for _, number, place in choices:
        changed = problem.with_spill(number, place, _units(problem, graph, number, place), room)
        if find_sequence(changed, [*members, len(problem.tasks)], changed.used, attempts=4) is not None:
            return number, place
    wanted = dict.fromkeys((place for _, _, place in choices), 0)
    for number in members:
        for place, amount in problem.tasks[number].acquires:
            wanted[place] = wanted.get(place, 0) + amount
    fullest = max(
        {place for _, _, place in choices},
        key=lambda place: (problem.used[place] + wanted[place] - problem.cap[place], -place),
    )
    _, number, place = next(choice for choice in choices if choice[2] == fullest)
    return number, place


def _unblocked(problem: Problem, group: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """A sequence for a large group, and the (task, bin) spills that it needs to go first.

    Tasks are taken as they fit, those that free most first. Where none fits, the one that the fewest bytes
    keep out is let in by spills, the cheapest shards of its bins.
    """
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
    return sequence, spills


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
