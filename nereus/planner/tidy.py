"""Among equally fast choices, one that uses less: what the search leaves open, settled always alike.

Only the slowest seat of a stage decides its length, so the others can often be had with less memory or
fewer GPUs. Seat by seat, the candidate with the fewest bytes replaces the chosen one where nothing gets
longer or stops fitting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nereus.planner.problem import NUM_STAGES, Problem, evaluate

_TRIES = 64  # smaller candidates tried for a seat; they mostly fit at once


def tidy(problem: Problem, picks: Sequence[int]) -> tuple[int, ...]:
    """The same step (or less) with fewer bytes on the GPUs of each seat, seat by seat in order."""
    chosen = list(picks)
    for index in range(len(problem.seats)):
        before = evaluate(problem, dict(enumerate(chosen)))
        old = chosen[index]
        rows = np.flatnonzero(_no_worse(problem, chosen, index))
        seat = problem.seats[index]
        size = seat.persistent_bytes[rows] + seat.transient_bytes[rows]
        for row in rows[np.lexsort((rows, seat.gpus[rows], size))][:_TRIES].tolist():
            if row == old:
                break
            chosen[index] = row
            after = evaluate(problem, dict(enumerate(chosen)))
            if after.feasible and after.step_s <= before.step_s:
                break
            chosen[index] = old
    return tuple(chosen)


def _no_worse(problem: Problem, picks: Sequence[int], index: int) -> NDArray[np.bool_]:
    """Candidates that keep the seat's pool, sharing and room, and fit its stage's time by themselves."""
    seat, old = problem.seats[index], picks[index]
    pool = int(seat.pool[old])
    ok = (seat.pool == pool) & (seat.sync_s <= seat.sync_s[old])
    ok &= seat.persistent_bytes + seat.transient_bytes <= (
        seat.persistent_bytes[old] + seat.transient_bytes[old]
    )
    partner = problem.partner(index)
    if partner is not None and problem.seats[partner].layout[picks[partner]] == seat.layout[old]:
        ok &= seat.layout == seat.layout[old]
    peers = [at for at, other in enumerate(problem.seats) if other.stage == seat.stage]
    if seat.stage in problem.in_turn or len(peers) == 1:
        return np.asarray(ok & (seat.latency_s <= seat.latency_s[old]) & (seat.gpus <= seat.gpus[old]))
    longest = max(float(problem.seats[at].latency_s[picks[at]]) for at in peers)
    used = evaluate(problem, dict(enumerate(picks))).used_gpus
    stages = range(NUM_STAGES) if problem.owns_gpus(index) else (seat.stage,)
    spare = min(problem.pools[pool].num_gpus - used[stage][pool] for stage in stages)
    return np.asarray(ok & (seat.latency_s <= longest) & (seat.gpus <= seat.gpus[old] + spare))
