"""Exact plan selection: bound, dive, fix, join.

A case (see `pieces`) is solved by joining its pieces one after another into partial plans, all of one
length at once. A partial plan is dropped when it cannot fit, when its lower bound is not below the best
plan known, or when another is no worse in every respect. Nothing else is dropped, so what remains at the
end holds the best plan.
  bound  a stage takes at least what its remaining seats need when they divide its free GPUs best;
  dive   the same join with only the best few partial plans kept: a plan, hence an upper bound;
  fix    a candidate that alone lifts the bound above the best plan known is in no better plan;
  join   the exhaustive pass over what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.planner.frontier import non_dominated
from nereus.planner.partial import Case
from nereus.planner.pieces import Piece, cases
from nereus.planner.problem import Ints, Problem

_FIRST_DIVE, _SECOND_DIVE = 24, 192  # partial plans that a dive keeps
_THIN = 96  # candidates of a piece that the first dive looks at
_CROWD = 512  # partial plans beyond which dominance between them pays


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStats:
    """How much was looked at: candidates given and left after fixing, partial plans, cases."""

    num_candidates: int
    num_after_fixing: int
    num_partial_plans: int
    num_cases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The best choice: `picks[i]` is the candidate of seat i; `root_bound_s` the bound before the search."""

    step_s: float
    picks: tuple[int, ...]
    root_bound_s: float
    stats: SearchStats


class _Search:
    """The best plan found so far, and the work done to find it."""

    def __init__(self, problem: Problem, upper_s: float) -> None:
        self.problem = problem
        self.upper_s = upper_s
        self.picks: tuple[int, ...] | None = None
        self.num_partial_plans = 0
        self.num_after_fixing = 0

    def run(self, case: Case, width: int | None) -> None:
        """Join all pieces of a case; with `width` keep only so many partial plans after each (a dive)."""
        plans = case.root()
        remaining = frozenset(range(len(case.pieces)))
        for index in range(len(case.pieces)):
            remaining -= {index}
            plan, row, bound = case.join(plans, index, remaining, self.upper_s)
            self.num_partial_plans += len(plan)
            if not len(plan):
                return
            if not remaining:  # the bounds are the plans' steps
                best = np.argmin(bound, keepdims=True)
                plan, row = plan[best], row[best]
            elif width is not None and len(bound) > width:
                best = np.argpartition(bound, width)[:width]
                plan, row = plan[best], row[best]
            plans = case.extend(plans, index, remaining, plan, row)
            if width is None and len(plans) > _CROWD:
                plans = case.crowd_out(plans, remaining)
        self.upper_s = float(case.bound(plans)[0])
        picks = [0] * len(self.problem.seats)
        for piece, rows in zip(case.pieces, plans.rows, strict=True):
            for seat, candidates in zip(piece.seats, piece.rows, strict=True):
                picks[seat] = int(candidates[rows[0]])
        self.picks = tuple(picks)

    def fix(self, case: Case) -> bool:
        """Drop candidates that no better plan holds; False when a piece has none left."""
        root = case.root()
        everyone = frozenset(range(len(case.pieces)))
        kept = []
        for index, piece in enumerate(case.pieces):
            _, row, _ = case.join(root, index, everyone - {index}, self.upper_s)
            if not len(row):
                return False
            kept.append(piece.take(row) if len(row) < len(piece) else piece)
        case.replace_pieces(tuple(kept))
        return True

    def thin(self, case: Case) -> Case:
        """A case with few candidates in each piece: those with the lowest bounds among the undominated."""
        return Case(
            self.problem,
            tuple(p if len(p) <= _THIN else p.take(_spread(p)) for p in case.pieces),
        )


def _spread(piece: Piece) -> Ints:
    """At most about `_THIN` candidates: staircases of latency by GPUs under a ladder of memory limits."""
    memory = piece.persistent_bytes + piece.transient_bytes
    latency = np.sum(list(piece.latency_s.values()), axis=0) + piece.extra_s
    order = np.lexsort((latency, piece.gpus))
    chosen: list[Ints] = []
    levels = np.sort(memory)[[len(memory) // 20, len(memory) // 3, -1]]
    for level in levels:
        rows = order[memory[order] <= level]
        low = np.minimum.accumulate(latency[rows])
        rows = rows[np.flatnonzero(np.diff(low, prepend=np.inf) < 0)]
        every = max(1, -(-len(rows) * len(levels) // _THIN))
        chosen.append(rows[::every])
    return np.unique(np.concatenate(chosen))


def root_bound(problem: Problem) -> float:
    """What no plan can beat: every stage alone with all GPUs, memory left aside; infinite if none fits."""
    return min((_root_bound(Case(problem, pieces)) for pieces in cases(problem)), default=np.inf)


def _root_bound(case: Case) -> float:
    return float(case.bound(case.root())[0])


def solve(problem: Problem, *, upper_s: float = np.inf) -> Selection | None:
    """The best plan whose step is shorter than `upper_s`, or None when there is none. Exact.

    `picks` index the given candidates. Ties are broken the same way in every run.
    """
    search = _Search(problem, upper_s)
    todo = [Case(problem, pieces) for pieces in cases(problem)]
    bounds = [_root_bound(case) for case in todo]
    order = np.argsort(bounds, kind="stable")
    for at in order:  # any plan at all, from the case that promises most
        if search.picks is None and bounds[at] < search.upper_s:
            search.run(search.thin(todo[at]), _FIRST_DIVE)
    for at in order:
        case = todo[at]
        if bounds[at] >= search.upper_s or not search.fix(case):
            continue
        search.run(search.thin(case), _SECOND_DIVE)
        if not search.fix(case):
            continue
        case.replace_pieces(tuple(piece.take(non_dominated(piece.columns())) for piece in case.pieces))
        search.num_after_fixing += sum(map(len, case.pieces))
        search.run(case, None)
    if search.picks is None:
        return None
    return Selection(
        step_s=search.upper_s,
        picks=search.picks,
        root_bound_s=min(bounds),
        stats=SearchStats(
            num_candidates=sum(map(len, problem.seats)),
            num_after_fixing=search.num_after_fixing,
            num_partial_plans=search.num_partial_plans,
            num_cases=len(todo),
        ),
    )
