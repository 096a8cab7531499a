"""The page of overheads: costs are medians beyond an untracked step on the dearer database."""

from __future__ import annotations

from typing import Any

from benchmarks.overhead_page import costs_s, tables


def kind(**p50_ms: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {"p50_ms": value, "max_ms": 2 * value, "cpu_ms": 1.0} for name, value in p50_ms.items()
    }
    found["auto 1 s"] = {"level": "step", "steps_a_run": 4, "share": 0.021, "worst_share": 0.05}
    found["growth"] = [
        {"steps": 50, "p50_ms": 200.0, "size_mb": 20.0},
        {"steps": 80, "p50_ms": 210.0, "size_mb": 31.4},
    ]
    return found


MEASURED = {
    "sqlite": kind(none=2.0, step=22.0, tasks=45.1, full=231.0),
    "postgres": kind(none=1.0, step=26.0, tasks=40.0, full=301.0),
}


def test_costs_are_those_of_the_dearer_database_and_half_as_much_rounded_up() -> None:
    assert costs_s(MEASURED) == {"full": 0.45, "tasks": 0.065, "step": 0.038}


def test_what_lies_beside_a_step_costs_the_cpu_that_it_takes() -> None:
    beside = {level: {"p50_ms": 3.0, "cpu_ms": 21.0, "max_ms": 4.0} for level in ("step", "tasks", "full")}
    costs = costs_s({"sqlite": {"none": {"p50_ms": 2.0, "cpu_ms": 1.0, "max_ms": 3.0}, **beside}})
    assert costs == {"full": 0.03, "tasks": 0.03, "step": 0.03}


def test_the_tables_have_every_level_step_length_and_database() -> None:
    lines = list(tables(MEASURED))
    assert "| `full` | 231.0, 462 | 301.0, 602 | 1.0 |" in lines
    assert "| 1 s | `step`, 4 steps a task run | 2.10%, 5.00% | 2.10%, 5.00% |" in lines
    assert "| Postgres | 80 | 200 | 210 | 31 MB |" in lines


def test_a_database_that_was_not_measured_is_left_out() -> None:
    lines = list(tables({"sqlite": MEASURED["sqlite"]}))
    assert "| `step` | 22.0, 44 | 1.0 |" in lines
    assert not any("Postgres" in line for line in lines)
