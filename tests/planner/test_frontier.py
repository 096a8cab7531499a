"""Staircases answer what a budget buys; the dominance filter drops exactly the beaten rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.planner.frontier import Staircase, non_dominated

SMALL = st.integers(1, 9)
POINTS = st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=12)


def staircase(points: list[tuple[int, int]]) -> Staircase:
    gpus, latency = np.array(points).T
    return Staircase.of(gpus.astype(np.int64), latency.astype(np.float64))


def cheapest(points: list[tuple[int, int]], budget: int) -> float:
    return min((latency for gpus, latency in points if gpus <= budget), default=np.inf)


@given(POINTS)
def test_table_gives_the_lowest_latency_within_each_budget(points: list[tuple[int, int]]) -> None:
    table = staircase(points).table(20)
    assert [cheapest(points, budget) for budget in range(21)] == table.tolist()


@settings(max_examples=60)
@given(st.lists(POINTS, min_size=1, max_size=3))
def test_together_divides_a_budget_in_the_best_way(parts: list[list[tuple[int, int]]]) -> None:
    table = Staircase.together([staircase(points) for points in parts]).table(20)

    def best(at: int, budget: int) -> float:
        if at == len(parts):
            return 0.0
        return min(max(cheapest(parts[at], mine), best(at + 1, budget - mine)) for mine in range(budget + 1))

    assert [best(0, budget) for budget in range(21)] == table.tolist()


def test_nothing_to_choose_from_costs_infinity() -> None:
    empty = Staircase(np.zeros(0, dtype=np.int64), np.zeros(0))
    assert np.isinf(empty.table(4)).all()
    assert np.isinf(Staircase.together([empty, staircase([(1, 1)])]).table(4)).all()


@settings(max_examples=80)
@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(SMALL, min_size=width, max_size=width), min_size=1, max_size=40)
    ),
    st.sampled_from([2, 128]),
)
def test_filter_keeps_one_of_each_unbeaten_row(rows: list[list[int]], block: int) -> None:
    columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    kept = [tuple(rows[at]) for at in non_dominated(columns, block)]
    unbeaten = {
        tuple(row)
        for row in rows
        if not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
    }
    assert sorted(kept) == sorted(unbeaten)
