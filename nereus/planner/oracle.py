"""Independent solvers for the compact program: CP-SAT, HiGHS and SCIP, one thread, to proven optimality.

They are the search's test oracle and its yardstick, never its substitute; each needs its own package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from nereus.errors import NereusError, explain
from nereus.planner.milp import Program, build
from nereus.planner.problem import Problem

SolverName = Literal["cp-sat", "highs", "scip"]
Outcome = tuple[float | None, float, bool]  # optimum (None: infeasible), bound, proven; in the program's unit

MICROSECONDS = 1_000_000
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a solver says: the optimum (None: infeasible), its bound, whether it proved it, CPU seconds."""

    step_s: float | None
    bound_s: float
    proven: bool
    cpu_s: float


def ask(problem: Problem, solver: SolverName, *, time_limit_s: float = 120.0) -> Answer:
    """Solve a problem with an independent solver; building its program counts as its time.

    CP-SAT knows whole numbers only, so it rounds latencies to microseconds and sizes to MiB: give it
    `whole_numbers(problem)` to compare exactly. Raises NereusError when a solver ends without an answer.
    """
    start = time.process_time()
    if solver == "cp-sat":
        program, scale = build(problem, per_second=MICROSECONDS, per_byte=1 / MIB), 1 / MICROSECONDS
    else:
        program, scale = build(problem), 1.0
    backend: Callable[[Program, float], Outcome] = {"cp-sat": _cp_sat, "highs": _highs, "scip": _scip}[solver]
    step, bound, proven = backend(program, time_limit_s)
    return Answer(
        step_s=None if step is None else step * scale,
        bound_s=bound * scale,
        proven=proven,
        cpu_s=time.process_time() - start,
    )


def whole_numbers(problem: Problem) -> Problem:
    """The same problem in whole microseconds and MiB, exact for every solver."""
    seats = tuple(
        replace(
            seat,
            persistent_bytes=np.round(seat.persistent_bytes / MIB) * MIB,
            transient_bytes=np.round(seat.transient_bytes / MIB) * MIB,
            latency_s=np.round(seat.latency_s * MICROSECONDS) / MICROSECONDS,
            sync_s=np.round(seat.sync_s * MICROSECONDS) / MICROSECONDS,
        )
        for seat in problem.seats
    )
    pools = tuple(
        replace(pool, limit_bytes=float(np.floor(pool.limit_bytes / MIB)) * MIB) for pool in problem.pools
    )
    return replace(problem, seats=seats, pools=pools)


def _cp_sat(program: Program, time_limit_s: float) -> Outcome:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    variables: list[Any] = [
        model.new_bool_var("") if at < program.num_binaries else model.new_int_var(0, int(np.ceil(high)), "")
        for at, high in enumerate(program.upper)
    ]

    def total(terms: dict[int, float]) -> Any:
        chosen = [variables[var] for var in terms]
        return cp_model.LinearExpr.weighted_sum(chosen, [round(value) for value in terms.values()])

    for row in program.rows:
        low = -(1 << 60) if np.isinf(row.low) else round(row.low)
        high = (1 << 60) if np.isinf(row.high) else int(np.floor(row.high + 1e-6))
        model.add_linear_constraint(total(row.terms), low, high)
    model.minimize(total(program.objective))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, np.inf, True
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise _unanswered("CP-SAT", solver.status_name(status))
    return solver.objective_value, solver.best_objective_bound, status == cp_model.OPTIMAL


def _highs(program: Program, time_limit_s: float) -> Outcome:
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    for option, setting in (("threads", 1), ("time_limit", time_limit_s), ("mip_rel_gap", 1e-9)):
        solver.setOptionValue(option, setting)
    for at, high in enumerate(program.upper):
        solver.addVar(0.0, high)
        solver.changeColCost(at, program.objective.get(at, 0.0))
    binaries = np.arange(program.num_binaries, dtype=np.int32)
    kinds = np.full(program.num_binaries, highspy.HighsVarType.kInteger)
    solver.changeColsIntegrality(len(binaries), binaries, kinds)
    for row in program.rows:
        index = np.fromiter(row.terms.keys(), dtype=np.int32, count=len(row.terms))
        value = np.fromiter(row.terms.values(), dtype=np.float64, count=len(row.terms))
        solver.addRow(row.low, row.high, len(index), index, value)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None, np.inf, True
    if not np.isfinite(info.objective_function_value):
        raise _unanswered("HiGHS", status)
    proven = status == highspy.HighsModelStatus.kOptimal
    return info.objective_function_value, info.mip_dual_bound, proven


def _scip(program: Program, time_limit_s: float) -> Outcome:
    import pyscipopt

    model = pyscipopt.Model()
    model.hideOutput()
    model.setParam("limits/time", time_limit_s)
    model.setParam("parallel/maxnthreads", 1)
    variables = [
        model.addVar(
            vtype="B" if at < program.num_binaries else "C",
            lb=0.0,
            ub=high,
            obj=program.objective.get(at, 0.0),
        )
        for at, high in enumerate(program.upper)
    ]
    for row in program.rows:
        total = pyscipopt.quicksum(value * variables[var] for var, value in row.terms.items())
        if row.low == row.high:
            model.addCons(total == row.low)
        elif np.isfinite(row.low):
            model.addCons(total >= row.low)
        elif row.terms:
            model.addCons(total <= row.high)
    model.optimize()
    status = model.getStatus()
    if status == "infeasible":
        return None, np.inf, True
    if model.getNSols() == 0:
        raise _unanswered("SCIP", status)
    return model.getObjVal(), model.getDualbound(), status == "optimal"


def _unanswered(solver: str, status: object) -> NereusError:
    return NereusError(
        explain(f"{solver} gave no answer", values=f"status {status}", remedy="raise the time limit")
    )
