"""Markov-chain Monte Carlo over plans, after ReaL's search: the yardstick for heuristics.

ReaL walks over assignments of a device mesh and a strategy to every model function call. A move gives one
call another random assignment; it is taken with probability min(1, exp(-beta * increase)). A plan that
does not fit in memory is not forbidden but costs three times its time. Here a move picks another
candidate for one seat, and using too many GPUs is punished like too much memory; the cost of a plan is
the same as every other solver's.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from nereus.planner.problem import Problem, evaluate

_OUT_OF_MEMORY = 3.0
_CHECK_EVERY = 256  # moves between two looks at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The best plan seen: its step (None: no feasible plan was met), moves made, CPU seconds."""

    step_s: float | None
    num_moves: int
    cpu_s: float


def search(problem: Problem, *, cpu_limit_s: float, seed: int = 0, beta: float = 40.0) -> Walk:
    """Walk for `cpu_limit_s`. `beta` is in units of one over the relative increase of the cost."""
    start = time.process_time()
    rng = random.Random(seed)
    sizes = [len(seat) for seat in problem.seats]
    picks = {index: _leanest(problem, index) for index in range(len(sizes))}
    cost, feasible = _cost(problem, picks)
    best = cost if feasible else math.inf
    moves = 0
    while moves % _CHECK_EVERY or time.process_time() - start < cpu_limit_s:
        moves += 1
        index = rng.randrange(len(sizes))
        old = picks[index]
        picks[index] = rng.randrange(sizes[index])
        new, feasible = _cost(problem, picks)
        if feasible and new < best:
            best = new
        if new <= cost or rng.random() < math.exp(-beta * (new - cost) / cost):
            cost = new
        else:
            picks[index] = old
    return Walk(step_s=None if math.isinf(best) else best, num_moves=moves, cpu_s=time.process_time() - start)


def _leanest(problem: Problem, index: int) -> int:
    """The start: each seat with the least memory, which ReaL finds by its own greedy pass."""
    seat = problem.seats[index]
    return int((seat.persistent_bytes + seat.transient_bytes).argmin())


def _cost(problem: Problem, picks: dict[int, int]) -> tuple[float, bool]:
    value = evaluate(problem, picks)
    return (value.step_s if value.feasible else _OUT_OF_MEMORY * value.step_s), value.feasible
