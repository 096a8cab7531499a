"""The search is exact: it equals enumeration, CP-SAT, HiGHS and SCIP, on problems of every shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from nereus.planner.oracle import SolverName, ask
from nereus.planner.problem import Problem, evaluate
from nereus.planner.search import Selection, solve
from nereus.planner.tidy import tidy
from tests.planner.random_problems import random_problem

# The solvers' own feasibility tolerances are 1e-6 of a row's scale; latencies are whole microseconds.
TOLERANCE_S = 1e-5
FEASIBLE = 1  # a seed whose problem has a plan


def check_choice(problem: Problem, found: Selection) -> None:
    """The choice is feasible and costs what the search says, by the plain definition."""
    value = evaluate(problem, dict(enumerate(found.picks)))
    assert value.feasible
    # Sums in another order: equal up to rounding.
    assert value.step_s == pytest.approx(found.step_s, rel=1e-12)
    assert found.root_bound_s <= found.step_s * (1 + 1e-12)


def check_equal(seed: int, solver: SolverName) -> bool:
    """Search and solver agree on one problem; returns whether it was feasible."""
    problem = random_problem(seed)
    found, answer = solve(problem), ask(problem, solver)
    assert answer.proven
    if answer.step_s is None:
        assert found is None, f"seed {seed}: {solver} says infeasible"
        return False
    assert found is not None, f"seed {seed}: {solver} found {answer.step_s}"
    assert found.step_s == pytest.approx(answer.step_s, abs=TOLERANCE_S), f"seed {seed}"
    check_choice(problem, found)
    return True


@pytest.mark.parametrize("block", range(10))
def test_equal_to_cp_sat_on_200_random_problems(block: int) -> None:
    pytest.importorskip("ortools")
    feasible = sum(check_equal(seed, "cp-sat") for seed in range(block * 20, block * 20 + 20))
    assert feasible > 0, "a block without a feasible problem shows nothing"


def test_equal_to_highs_on_50_random_problems() -> None:
    pytest.importorskip("highspy")
    assert sum(check_equal(seed, "highs") for seed in range(1000, 1050)) > 20


def test_equal_to_scip_on_10_random_problems() -> None:
    pytest.importorskip("pyscipopt")
    assert sum(check_equal(seed, "scip") for seed in range(2000, 2010)) > 2


def best_by_enumeration(problem: Problem) -> float:
    """The optimum over all choices, by the plain definition."""
    values = (
        evaluate(problem, dict(enumerate(rows)))
        for rows in product(*(range(len(seat)) for seat in problem.seats))
    )
    return min((value.step_s for value in values if value.feasible), default=float("inf"))


@pytest.mark.parametrize("seed", range(3000, 3025))
def test_equal_to_enumeration_on_tiny_problems(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(seed)
    few = tuple(
        seat.take(np.sort(rng.choice(len(seat), size=min(4, len(seat)), replace=False)))
        for seat in problem.seats
    )
    tiny = replace(problem, seats=few)
    best, found = best_by_enumeration(tiny), solve(tiny)
    if found is None:
        assert best == float("inf")
    else:
        assert found.step_s == pytest.approx(best, rel=1e-12)
        check_choice(tiny, found)


def test_tidy_keeps_the_step_and_never_adds_bytes() -> None:
    improved = 0
    for seed in range(60):
        problem = random_problem(seed)
        found = solve(problem)
        if found is None:
            continue
        picks = tidy(problem, found.picks)
        value = evaluate(problem, dict(enumerate(picks)))
        assert value.feasible
        assert value.step_s <= found.step_s * (1 + 1e-12)
        for seat, old, new in zip(problem.seats, found.picks, picks, strict=True):
            sizes = seat.persistent_bytes + seat.transient_bytes
            assert sizes[new] <= sizes[old]
            improved += sizes[new] < sizes[old]
        assert tidy(problem, picks) == picks
    assert improved > 10


def test_upper_limit_excludes_plans_that_are_not_shorter() -> None:
    problem = random_problem(FEASIBLE)
    best = solve(problem)
    assert best is not None
    assert solve(problem, upper_s=best.step_s) is None
    again = solve(problem, upper_s=best.step_s * 1.001)
    assert again is not None
    assert again.step_s == best.step_s


def test_more_gpus_or_more_memory_never_make_a_plan_longer() -> None:
    feasible = 0
    for seed in range(40):
        problem = random_problem(seed)
        best = solve(problem)
        for gpus, memory in ((2, 1.0), (1, 1.2)):
            pools = tuple(
                replace(pool, num_gpus=pool.num_gpus * gpus, limit_bytes=pool.limit_bytes * memory)
                for pool in problem.pools
            )
            roomy = solve(replace(problem, pools=pools))
            if best is not None:
                feasible += 1
                assert roomy is not None
                assert roomy.step_s <= best.step_s * (1 + 1e-12)
    assert feasible > 20


def test_order_of_candidates_does_not_change_the_optimum() -> None:
    problem = random_problem(FEASIBLE)
    rng = np.random.default_rng(0)
    mixed = replace(problem, seats=tuple(seat.take(rng.permutation(len(seat))) for seat in problem.seats))
    one, two = solve(problem), solve(mixed)
    assert one is not None
    assert two is not None
    assert one.step_s == pytest.approx(two.step_s, rel=1e-12)


def test_sharing_a_layout_counts_the_weights_once() -> None:
    problem = random_problem(FEASIBLE)
    serve, train = problem.pairs[0]
    seats = list(problem.seats)
    common = np.intersect1d(seats[serve].layout, seats[train].layout)[0]
    picks = dict.fromkeys(range(len(seats)), 0)
    picks[serve] = int(np.flatnonzero(seats[serve].layout == common)[0])
    picks[train] = int(np.flatnonzero(seats[train].layout == common)[0])
    together = evaluate(problem, picks)
    seats[serve] = replace(seats[serve], layout=seats[serve].layout + 1_000_000_000_000)
    apart = evaluate(replace(problem, seats=tuple(seats)), picks)
    pool = int(seats[serve].pool[picks[serve]])
    saved = seats[serve].persistent_bytes[picks[serve]]
    assert apart.memory_bytes[pool] - together.memory_bytes[pool] == pytest.approx(saved)
    assert apart.sync_s - together.sync_s == pytest.approx(seats[serve].sync_s[picks[serve]])
