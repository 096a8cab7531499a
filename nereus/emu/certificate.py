"""The certificate: a sequence in which all that is left can be done one by one within memory.

Invariant I13 (safe state): once the running tasks are done, those not yet started can be carried out in the
order of a known sequence, none exceeding a bin's capacity. It holds at first, by search. Starting the head
keeps it. Starting another task keeps it if, with that task's net addition in place, every task before it in
the sequence still fits; later ones see the same memory as before. Ends of tasks only release. So when nothing
runs, the head fits: a schedule that starts tasks by certificate never deadlocks.

Only bins where the task leaves more than it found need a look, and tasks that touch no bin need none.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from nereus.emu.schedule_problem import Problem

SMALL = 32  # tasks in a group that is searched anew for single decisions
THOROUGH = 64  # tasks in a group that gets all attempts
ATTEMPTS = 64
STEPS = 64  # choices of one attempt, beside one for every task
SHAKE = 5.0  # mean acquisitions


def components(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Tasks that touch bins, with all before and after them; groups share no bin and no precedence."""
    tasks, unlocks = problem.tasks, problem.unlocks
    places_of = [[place for place, _ in task.acquires + task.releases] for task in tasks]
    on_bin: dict[int, list[int]] = defaultdict(list)
    for number, places in enumerate(places_of):
        for place in places:
            on_bin[place].append(number)
    is_new = [True] * len(tasks)
    groups: list[tuple[int, ...]] = []
    for seed, places in enumerate(places_of):
        if not places or not is_new[seed]:
            continue
        is_new[seed], group = False, [seed]
        for number in group:  # grows while it is walked
            near = [*tasks[number].after, *unlocks[number]]
            for place in places_of[number]:
                near += on_bin.pop(place, ())
            for other in near:
                if is_new[other]:
                    is_new[other] = False
                    group.append(other)
        groups.append(tuple(sorted(group)))
    return tuple(sorted(groups))


def find_sequence(
    problem: Problem,
    group: Sequence[int],
    used: Sequence[int],
    *,
    done: frozenset[int] = frozenset(),
    attempts: int | None = None,
) -> list[int] | None:
    """An order of the group's tasks in which each fits when those before it are done; None if none was found.

    Depth first. A task that fits and leaves no bin fuller is taken without a choice, since no continuation is
    lost by it. Sets of tasks that led nowhere are not entered twice. After some choices the search begins
    anew, with its preferences shaken: an early mistake is seldom undone by the last choices. An attempt that
    ends before has tried everything. Measured on 103 feasible instances with at most 1.25 shards of slack on
    8 and 16 GPUs: 64 attempts miss 1, one long search 13. Groups of more than 64 tasks get two attempts.
    """
    if attempts is None:
        attempts = ATTEMPTS if len(group) <= THOROUGH else 2
    search = _Search(problem, group, list(used), set(done))
    draw = random.Random(len(group))
    for attempt in range(attempts):
        if search.run(shake=draw.random if attempt else None):
            return search.sequence
        if search.steps > 0:
            break
    return None


class _Search:
    """Depth-first search over sets of finished tasks."""

    def __init__(self, problem: Problem, group: Sequence[int], used: list[int], done: set[int]) -> None:
        self.problem = problem
        self.group = group
        self.used = used
        self.done = done
        self.steps = 0
        self.shake: Callable[[], float] | None = None
        self.sequence: list[int] = []
        self.dead: set[frozenset[int]] = set()
        harmless, released = problem.harmless, problem.released
        self._harmless = [number for number in self._left() if harmless[number]]
        choices = [number for number in self._left() if not harmless[number]]
        self._any_waits = any(problem.unlocks)
        self._by_release = sorted(choices, key=lambda number: (-released[number], number))

    def run(self, *, shake: Callable[[], float] | None) -> bool:
        """Extend the sequence by all of the group; False leaves it as it was."""
        self.steps, self.shake = STEPS + len(self.group), shake
        num_tasks = len(self._harmless) + len(self._by_release)
        open_sets: list[tuple[Iterator[int], list[int], int]] = []
        blocked = self._harmless
        while True:
            blocked, forced = self._take_forced(blocked)
            if len(self.sequence) == num_tasks:
                return True
            is_dead = bool(self.dead) and frozenset(self._left()) in self.dead
            open_sets.append((iter(()) if is_dead else self._choices(), blocked, forced))
            chosen = None
            while chosen is None:
                rest, blocked, forced = open_sets[-1]
                chosen = next(rest, None) if self.steps > 0 else None
                if chosen is None:
                    if self.steps > 0:
                        self.dead.add(frozenset(self._left()))
                    self._undo(forced)
                    open_sets.pop()
                    if not open_sets:
                        return False
                    self._undo(1)
            self.steps -= 1
            self._take(chosen)

    def _left(self) -> list[int]:
        """The tasks of the group that are not done."""
        return [number for number in self.group if number not in self.done]

    def _choices(self) -> Iterator[int]:
        """The tasks that fit, best first: none of them is harmless, since of those what fits has been taken.

        Where no task waits for another their worth never changes, so that one order does for all choices; the
        next is then looked for when it is asked for.
        """
        if self.shake is None and not self._any_waits:
            return (number for number in self._by_release if number not in self.done and self._fits(number))
        return iter(sorted(filter(self._fits, self._left()), key=self._worth))

    def _take_forced(self, waiting: list[int]) -> tuple[list[int], int]:
        """Take tasks that fit and leave no bin fuller, until there is none; those that do not fit, and the
        number of those taken.
        """
        first = len(self.sequence)
        again = True
        while again:
            blocked: list[int] = []
            for number in waiting:
                if self._fits(number):
                    self._take(number)
                else:
                    blocked.append(number)
            again, waiting = 0 < len(blocked) < len(waiting), blocked
        return waiting, len(self.sequence) - first

    def _fits(self, number: int) -> bool:
        # Plain loops: this is the innermost question of the search.
        task, used, cap = self.problem.tasks[number], self.used, self.problem.cap
        for other in task.after:
            if other not in self.done:
                return False
        for place, amount in task.acquires:  # noqa: SIM110
            if used[place] + amount > cap[place]:
                return False
        return True

    def _worth(self, number: int) -> tuple[float, int]:
        """Small for tasks that release much, also through tasks that wait for them."""
        tasks, released = self.problem.tasks, self.problem.released
        freed = float(released[number])
        for other in self.problem.unlocks[number]:
            missing = sum(task not in self.done for task in tasks[other].after)
            share = 1.0 if missing == 1 else 0.6 / missing
            freed += share * released[other]
        if self.shake is not None:
            freed += SHAKE * self.problem.mean_acquired * self.shake()
        return -freed, number

    def _take(self, number: int) -> None:
        for place, net in self.problem.net[number].items():
            self.used[place] += net
        self.done.add(number)
        self.sequence.append(number)

    def _undo(self, count: int) -> None:
        for _ in range(count):
            number = self.sequence.pop()
            self.done.remove(number)
            for place, net in self.problem.net[number].items():
                self.used[place] -= net


class Certificate:
    """The invariant while a schedule unfolds. `settled` is each bin's use once the running tasks are done."""

    def __init__(self, problem: Problem, sequences: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.settled = list(problem.used)
        self._group_of = {number: at for at, sequence in enumerate(sequences) for number in sequence}
        # Keys in order, so that any task can be taken out at once.
        self._sequences = [dict.fromkeys(sequence) for sequence in sequences]
        self._on_bin: dict[int, list[int]] = defaultdict(list)
        for sequence in sequences:
            self._enter(sequence)
        self._begun: set[int] = set()
        self._refused: dict[int, int] = {}

    def admits(self, number: int) -> bool:
        """Whether starting the task, which must fit at this moment, keeps the invariant. If so, it begins."""
        at = self._group_of.get(number)
        if at is None:
            return True
        if self._refused.get(number) == len(self._begun):
            return False  # nothing has started since: ends of tasks change nothing here
        sequence = self._sequences[at]
        if next(iter(sequence)) != number and not self._still_fits(number):
            rest = self._another(sequence, number) if len(sequence) <= SMALL else None
            if rest is None:
                self._refused[number] = len(self._begun)
                return False
            self._leave(sequence)
            self._sequences[at] = dict.fromkeys(rest)
            self._enter(rest)
        else:
            del sequence[number]
            self._leave((number,))
        for place, net in self.problem.net[number].items():
            self.settled[place] += net
        self._begun.add(number)
        return True

    def _enter(self, sequence: Iterable[int]) -> None:
        for number in sequence:
            for place in self.problem.net[number]:
                self._on_bin[place].append(number)

    def _leave(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for place in self.problem.net[number]:
                self._on_bin[place].remove(number)

    def _still_fits(self, number: int) -> bool:
        """Whether the tasks before it in its sequence fit beside what it leaves."""
        amounts, cap = self.problem.amounts, self.problem.cap
        for place, net in self.problem.net[number].items():
            if net <= 0:
                continue
            level = self.settled[place] + net
            for other in self._on_bin[place]:
                if other == number:
                    break
                acquired, released = amounts[other][place]
                if acquired and level + acquired > cap[place]:
                    return False
                level += acquired - released
        return True

    def _another(self, sequence: Iterable[int], number: int) -> list[int] | None:
        """Another sequence of the rest, were the task started now."""
        rest = sorted(other for other in sequence if other != number)
        used = list(self.settled)
        for place, net in self.problem.net[number].items():
            used[place] += net
        done = frozenset({*self._begun, number})
        return find_sequence(self.problem, rest, used, done=done, attempts=1)
