"""The shortest timeline of a scheduling problem by CP-SAT (ortools): the yardstick of the list scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from nereus.emu.layout import Rank
from nereus.emu.schedule_problem import Problem, RankMask

SCALE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """`status` is OPTIMAL, FEASIBLE, INFEASIBLE or UNKNOWN; `makespan_s` is None where none was found."""

    status: str
    makespan_s: float | None
    bound_s: float


def solve(problem: Problem, *, limit_s: float, hint: tuple[float, ...] = ()) -> Optimum:
    """Solve with one thread, in thousandths of the unit of the durations. `hint` are starts to begin from."""
    model = cp_model.CpModel()
    horizon = int(SCALE * sum(task.seconds for task in problem.tasks)) + len(problem.tasks)
    starts = [model.new_int_var(0, horizon, "") for _ in problem.tasks]
    sizes = [round(SCALE * task.seconds) for task in problem.tasks]
    intervals = [
        model.new_fixed_size_interval_var(start, size, "") for start, size in zip(starts, sizes, strict=True)
    ]
    for masks in (
        [task.sends for task in problem.tasks],
        [task.receives for task in problem.tasks],
        [task.copies for task in problem.tasks],
    ):
        for users in sorted({tuple(users) for users in _users(masks).values() if len(users) > 1}):
            model.add_no_overlap([intervals[number] for number in users])
    for number, task in enumerate(problem.tasks):
        for other in task.after:
            model.add(starts[number] >= starts[other] + sizes[other])
    _add_memory(model, problem, starts, sizes)
    makespan = model.new_int_var(0, horizon, "")
    for start, size in zip(starts, sizes, strict=True):
        model.add(makespan >= start + size)
    model.minimize(makespan)
    for start, value in zip(starts, hint, strict=False):
        model.add_hint(start, round(SCALE * value))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Optimum(
        status=solver.status_name(status),
        makespan_s=solver.objective_value / SCALE if found else None,
        bound_s=solver.best_objective_bound / SCALE,
    )


def _users(masks: list[RankMask]) -> dict[Rank, list[int]]:
    """The tasks that use each rank's link."""
    out: dict[Rank, list[int]] = {}
    for number, mask in enumerate(masks):
        while mask:
            low = mask & -mask
            out.setdefault(low.bit_length() - 1, []).append(number)
            mask ^= low
    return out


def _add_memory(
    model: cp_model.CpModel, problem: Problem, starts: list[cp_model.IntVar], sizes: list[int]
) -> None:
    """On every bin, what has been acquired and not yet released stays within the cap."""
    for place, cap in enumerate(problem.cap):
        times: list[cp_model.LinearExprT] = [0]
        changes = [problem.used[place]]
        for number, task in enumerate(problem.tasks):
            for other, amount in task.acquires:
                if other == place:
                    times.append(starts[number])
                    changes.append(amount)
            for other, amount in task.releases:
                if other == place:
                    times.append(starts[number] + sizes[number])
                    changes.append(-amount)
        model.add_reservoir_constraint(times, changes, -(1 << 50), cap)
