"""List scheduling by certificate: at every event, start each task that may start, in an order of preference.

Several preferences are tried and the shortest result is kept: the busiest links first, the certificate's
order, then variations of the best so far. A result as long as the busiest link's work is optimal, and ends
the search.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.emu.certificate import Certificate
from nereus.emu.footprint import Ints
from nereus.emu.schedule_problem import Problem, Task

LARGE = 64  # above that many tasks one order of preference is tried
MOST_TRIES, TRIED_TASKS = 256, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each task starts and ends, in seconds from the beginning of the transition."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """When the last task ends."""
        return max(self.end_s, default=0.0)


@dataclass(frozen=True, slots=True)
class _Preference:
    """An order of tasks. `patient`: what waits keeps its links and bins from tasks further down."""

    order: tuple[int, ...]
    patient: bool = False


def shortest(problem: Problem, sequences: Sequence[Sequence[int]], *, tries: int | None = None) -> Timeline:
    """The shortest timeline found. `sequences` certify each component that touches memory. Deterministic."""
    tasks = problem.tasks
    if tries is None:
        tries = min(MOST_TRIES, TRIED_TASKS // max(1, len(tasks))) if len(tasks) <= LARGE else 1
    work = _link_work(problem)
    paths = _longest_paths(problem) if any(task.after for task in tasks) else ()
    bound = max((*work, *paths), default=0.0)
    chosen = _Preference(tuple(sorted(range(len(tasks)), key=lambda i: (-work[i], -tasks[i].seconds, i))))
    best = _Player(problem, sequences).play(chosen)
    draw = random.Random(len(tasks))
    for attempt in range(1, tries):
        if best.makespan_s <= bound * (1 + 1e-9):
            break
        candidate = _in_sequence(problem, sequences) if attempt == 1 else _varied(chosen, draw)
        found = _Player(problem, sequences).play(candidate)
        if found.makespan_s <= best.makespan_s:
            best, chosen = found, candidate
    return best


def _in_sequence(problem: Problem, sequences: Sequence[Sequence[int]]) -> _Preference:
    """The order of the certificate; tasks outside it last."""
    listed = [number for sequence in sequences for number in sequence]
    return _Preference((*listed, *sorted(set(range(len(problem.tasks))) - set(listed))))


def _varied(preference: _Preference, draw: random.Random) -> _Preference:
    """The preference with one or two tasks moved elsewhere; now and then, any order at all."""
    out = list(preference.order)
    patient = preference.patient if draw.random() < 0.5 else draw.random() < 0.5
    if draw.random() < 0.25:
        draw.shuffle(out)
    else:
        for _ in range(draw.choice((1, 1, 2))):
            out.insert(draw.randrange(len(out)), out.pop(draw.randrange(len(out))))
    return _Preference(tuple(out), patient)


class _Player:
    """Plays the events of one preference forward."""

    def __init__(self, problem: Problem, sequences: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.certificate = Certificate(problem, sequences)
        self.used = list(problem.used)
        self.ended = [False] * len(problem.tasks)
        self.running: list[tuple[float, int]] = []
        self.taken = 0  # links, as in `Problem.links`

    def play(self, preference: _Preference) -> Timeline:
        """The timeline of the preference."""
        tasks = self.problem.tasks
        start, end = [0.0] * len(tasks), [0.0] * len(tasks)
        waiting: Sequence[int] = preference.order
        now = 0.0
        while waiting or self.running:
            begun = self._start(waiting, patient=preference.patient)
            if not begun and not self.running:
                begun = self._start(waiting, patient=False)
            for number in begun:
                start[number], end[number] = now, now + tasks[number].seconds
                heapq.heappush(self.running, (end[number], number))
            if begun:
                waiting = [number for number in waiting if number not in begun]
            assert self.running, f"I13: {len(waiting)} tasks wait and none runs"
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._end(heapq.heappop(self.running)[1])
        return Timeline(start_s=tuple(start), end_s=tuple(end))

    def _start(self, waiting: Sequence[int], *, patient: bool) -> set[int]:
        """Start what may start, in order; returns the numbers of those tasks."""
        tasks, links, taken = self.problem.tasks, self.problem.links, self.taken
        kept_bins: set[int] = set()
        begun: set[int] = set()
        for number in waiting:
            if (
                not links[number] & taken
                and self._fits(tasks[number], kept_bins)
                and self.certificate.admits(number)
            ):
                begun.add(number)
                self.taken |= links[number]
                for place, amount in tasks[number].acquires:
                    self.used[place] += amount
            elif patient:
                kept_bins.update(place for place, _ in tasks[number].acquires)
            else:
                continue
            taken |= links[number]
        return begun

    def _fits(self, task: Task, kept_bins: set[int]) -> bool:
        ended, used, cap = self.ended, self.used, self.problem.cap
        for other in task.after:
            if not ended[other]:
                return False
        for place, amount in task.acquires:
            if place in kept_bins or used[place] + amount > cap[place]:
                return False
        return True

    def _end(self, number: int) -> None:
        self.taken ^= self.problem.links[number]
        for place, amount in self.problem.tasks[number].releases:
            self.used[place] -= amount
        self.ended[number] = True


def _link_work(problem: Problem) -> list[float]:
    """For every task, the seconds of work on the busiest link that it takes."""
    work = np.zeros(len(problem.tasks))
    if any(problem.links):
        seconds = np.array([task.seconds for task in problem.tasks])
        task, link = _places(problem.links)
        busy = np.bincount(link, weights=seconds[task])
        begins = np.flatnonzero(np.diff(task, prepend=-1))
        work[task[begins]] = np.maximum.reduceat(busy[link], begins)
    out: list[float] = work.tolist()
    return out


def _places(masks: Sequence[int]) -> tuple[Ints, Ints]:
    """(task, bit) for every bit of the masks, in order."""
    width = max(masks).bit_length() // 64 + 1
    data = b"".join([mask.to_bytes(8 * width, "little") for mask in masks])
    words = np.frombuffer(data, dtype="<u8")
    words_at = np.flatnonzero(words)  # few: most tasks take few ranks
    bits_at = np.flatnonzero(np.unpackbits(words[words_at].view(np.uint8), bitorder="little"))
    task, word = np.divmod(words_at, width)
    at = bits_at >> 6
    return task[at], 64 * word[at] + (bits_at & 63)


def _longest_paths(problem: Problem) -> list[float]:
    """When each task can end at the earliest, by precedence alone."""
    out: dict[int, float] = {}

    def ends(number: int) -> float:
        if number not in out:
            task = problem.tasks[number]
            out[number] = max((ends(other) for other in task.after), default=0.0) + task.seconds
        return out[number]

    return [ends(number) for number in range(len(problem.tasks))]
