"""List scheduling by certificate: at every event, start each task that may start, in an order of preference.

Several preferences are tried and the shortest result is kept: the busiest links first, then that order with
tasks moved about. A result as long as the busiest link's work is optimal, and ends the search.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus.emu.certificate import Certificate
from nereus.emu.schedule_problem import Problem, RankMask

LARGE = 64  # above that many tasks one order of preference is tried
TRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each task starts and ends, in seconds from the beginning of the transition."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """When the last task ends."""
        return max(self.end_s, default=0.0)


def shortest(problem: Problem, sequences: Sequence[Sequence[int]], *, tries: int | None = None) -> Timeline:
    """The shortest timeline found. `sequences` certify each component that touches memory. Deterministic."""
    tasks = problem.tasks
    if tries is None:
        tries = TRIES if len(tasks) <= LARGE else 1
    work = _link_work(problem)
    paths = _longest_paths(problem) if any(task.after for task in tasks) else ()
    bound = max((*work, *paths), default=0.0)
    order = sorted(range(len(tasks)), key=lambda i: (-work[i], -tasks[i].seconds, i))
    best, best_order = _unfold(problem, sequences, order), order
    draw = random.Random(len(tasks))
    for other in _orders(problem, sequences, tries):
        if best.makespan_s <= bound * (1 + 1e-9):
            break
        candidate = _moved(best_order, draw) if other is None else other
        found = _unfold(problem, sequences, candidate)
        if found.makespan_s <= best.makespan_s:
            best, best_order = found, candidate
    return best


def _orders(problem: Problem, sequences: Sequence[Sequence[int]], tries: int) -> Iterator[list[int] | None]:
    """Orders to try after the first; None asks for a variation of the best so far."""
    if tries > 1:
        listed = [number for sequence in sequences for number in sequence]
        rest = sorted(set(range(len(problem.tasks))) - set(listed))
        yield listed + rest
        yield sorted(range(len(problem.tasks)), key=lambda i: (-problem.tasks[i].seconds, i))
    for _ in range(tries - 3):
        yield None


def _moved(order: Sequence[int], draw: random.Random) -> list[int]:
    """The order with one or two tasks moved elsewhere."""
    out = list(order)
    for _ in range(draw.choice((1, 1, 2))):
        out.insert(draw.randrange(len(out)), out.pop(draw.randrange(len(out))))
    return out


def _unfold(problem: Problem, sequences: Sequence[Sequence[int]], order: Sequence[int]) -> Timeline:
    """Play the events forward."""
    tasks, cap = problem.tasks, problem.cap
    certificate = Certificate(problem, sequences)
    used = list(problem.used)
    start, end = [0.0] * len(tasks), [0.0] * len(tasks)
    waiting, ended = list(order), [False] * len(tasks)
    running: list[tuple[float, int]] = []
    sends = receives = copies = 0
    now = 0.0
    while waiting or running:
        held: list[int] = []
        for number in waiting:
            task = tasks[number]
            may_start = (
                not (task.sends & sends or task.receives & receives or task.copies & copies)
                and all(ended[other] for other in task.after)
                and all(used[place] + amount <= cap[place] for place, amount in task.acquires)
                and certificate.admits(number)
            )
            if not may_start:
                held.append(number)
                continue
            sends, receives, copies = sends | task.sends, receives | task.receives, copies | task.copies
            for place, amount in task.acquires:
                used[place] += amount
            start[number], end[number] = now, now + task.seconds
            heapq.heappush(running, (end[number], number))
        waiting = held
        assert running, f"I13: {len(waiting)} tasks wait and none runs"
        now = running[0][0]
        while running and running[0][0] == now:
            _, number = heapq.heappop(running)
            task = tasks[number]
            sends, receives, copies = sends & ~task.sends, receives & ~task.receives, copies & ~task.copies
            for place, amount in task.releases:
                used[place] -= amount
            ended[number] = True
    return Timeline(start_s=tuple(start), end_s=tuple(end))


def _link_work(problem: Problem) -> list[float]:
    """For every task, the seconds of work on the busiest link that it takes."""
    seconds = np.array([task.seconds for task in problem.tasks])
    work = np.zeros(len(problem.tasks))
    for masks in (
        [task.sends for task in problem.tasks],
        [task.receives for task in problem.tasks],
        [task.copies for task in problem.tasks],
    ):
        if any(masks):
            uses = _bits(masks)
            np.maximum(work, (uses * (seconds @ uses)).max(axis=1), out=work)
    out: list[float] = work.tolist()
    return out


def _bits(masks: Sequence[RankMask]) -> NDArray[np.uint8]:
    """[tasks, ranks] 1 where the mask has the rank."""
    width = max(mask.bit_length() for mask in masks) // 8 + 1
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little")


def _longest_paths(problem: Problem) -> list[float]:
    """When each task can end at the earliest, by precedence alone."""
    out: dict[int, float] = {}

    def ends(number: int) -> float:
        if number not in out:
            task = problem.tasks[number]
            out[number] = max((ends(other) for other in task.after), default=0.0) + task.seconds
        return out[number]

    return [ends(number) for number in range(len(problem.tasks))]
