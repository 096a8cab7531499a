"""The plan-selection problem as a compact mixed-integer program, for solvers that check the search.

Variables: x[i,c] seat i takes candidate c; e[serve,c] the pair shares the layout of c; Z[s] seconds of a
stage; P[s,k] largest persistent bytes of a stage on a pool; T[k] largest transient bytes on a pool; with
timing `overlap` also the longer of the two sides. One assignment row a seat, one GPU row a stage and
pool, one memory row a pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from nereus.planner.problem import GENERATION, INFERENCE, NUM_STAGES, TRAINING, Problem


@dataclass(slots=True)
class Row:
    """`low <= sum of coefficient * variable <= high`."""

    terms: dict[int, float]
    low: float
    high: float


@dataclass(slots=True)
class Program:
    """Minimise `objective` over `rows`; binaries first, then continuous variables with these upper bounds."""

    num_binaries: int = 0
    upper: list[float] = field(default_factory=list)
    objective: dict[int, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    """Variable of candidate 0 of each seat; the others follow."""

    def variable(self, upper: float, cost: float = 0.0) -> int:
        """Add a variable in [0, upper]."""
        self.upper.append(upper)
        if cost:
            self.objective[len(self.upper) - 1] = cost
        return len(self.upper) - 1

    def add(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        """Add a row."""
        self.rows.append(Row({var: value for var, value in terms.items() if value}, low, high))


def build(problem: Problem, *, per_second: float = 1.0, per_byte: float = 1.0 / (1 << 30)) -> Program:
    """The program of a problem: its optimum is the best `step_s` of `evaluate` over feasible choices.

    Times are counted in units of 1 / `per_second` seconds and sizes in units of 1 / `per_byte` bytes, so
    that a solver sees numbers of a good scale (or whole ones).
    """
    problem = _scaled(problem, per_second, per_byte)
    program = Program()
    for seat in problem.seats:
        program.first.append(len(program.upper))
        for _ in range(len(seat)):
            program.variable(1.0)
    equal = _sharing(problem, program)
    program.num_binaries = len(program.upper)
    _stage_times(problem, program, equal)
    _gpu_rows(problem, program)
    _memory_rows(problem, program, equal)
    return program


def _scaled(problem: Problem, per_second: float, per_byte: float) -> Problem:
    seats = tuple(
        replace(
            seat,
            persistent_bytes=seat.persistent_bytes * per_byte,
            transient_bytes=seat.transient_bytes * per_byte,
            latency_s=seat.latency_s * per_second,
            sync_s=seat.sync_s * per_second,
        )
        for seat in problem.seats
    )
    pools = tuple(replace(pool, limit_bytes=pool.limit_bytes * per_byte) for pool in problem.pools)
    return replace(problem, seats=seats, pools=pools)


def _sharing(problem: Problem, program: Program) -> dict[tuple[int, int], int]:
    """Assignment rows, and e[serve, c] <= x[serve, c], e <= sum of x over the trainer's equal layouts."""
    for first, seat in zip(program.first, problem.seats, strict=True):
        program.add({first + c: 1.0 for c in range(len(seat))}, 1.0, 1.0)
    equal: dict[tuple[int, int], int] = {}
    for serve, train in problem.pairs:
        if problem.owns_gpus(serve):
            if (serve, train) in problem.must_share:
                program.add({}, 1.0, 1.0)  # no plan: what has its own GPUs shares nothing
            continue
        by_layout: dict[int, list[int]] = {}
        for c, layout in enumerate(problem.seats[train].layout.tolist()):
            by_layout.setdefault(layout, []).append(program.first[train] + c)
        groups: dict[int, list[int]] = {}
        for c, layout in enumerate(problem.seats[serve].layout.tolist()):
            if layout in by_layout:
                var = program.variable(1.0)
                equal[serve, c] = var
                groups.setdefault(layout, []).append(var)
                program.add({var: 1.0, program.first[serve] + c: -1.0}, high=0.0)
        if (serve, train) in problem.must_share:
            program.add({var: 1.0 for group in groups.values() for var in group}, 1.0, 1.0)
        for layout, chosen in groups.items():
            program.add({**dict.fromkeys(chosen, 1.0), **dict.fromkeys(by_layout[layout], -1.0)}, high=0.0)
    return equal


def _stage_times(problem: Problem, program: Program, equal: dict[tuple[int, int], int]) -> None:
    longest = float(sum(seat.latency_s.max() for seat in problem.seats))
    sync = problem.timing == "sync"
    stage = [program.variable(longest, 1.0 if sync else 0.0) for _ in range(NUM_STAGES)]
    if not sync:
        side = program.variable(longest, 1.0)
        program.add({side: 1.0, stage[GENERATION]: -1.0}, low=0.0)
        program.add({side: 1.0, stage[INFERENCE]: -1.0, stage[TRAINING]: -1.0}, low=0.0)
    together: dict[int, dict[int, float]] = {}
    for first, seat in zip(program.first, problem.seats, strict=True):
        terms = {first + c: -float(value) for c, value in enumerate(seat.latency_s)}
        if seat.stage in problem.in_turn:
            together.setdefault(seat.stage, {}).update(terms)
        else:
            program.add({stage[seat.stage]: 1.0, **terms}, low=0.0)
    for number, terms in together.items():
        program.add({stage[number]: 1.0, **terms}, low=0.0)
    for serve, _ in problem.pairs:
        for c, value in enumerate(problem.seats[serve].sync_s.tolist()):
            program.objective[program.first[serve] + c] = value
            if (serve, c) in equal:
                program.objective[equal[serve, c]] = -value


def _gpu_rows(problem: Problem, program: Program) -> None:
    everyone = range(len(problem.seats))
    own = [index for index in everyone if problem.owns_gpus(index)]
    for stage in range(NUM_STAGES):
        mine = [index for index in everyone if problem.seats[index].stage == stage and index not in own]
        groups = [[index] for index in mine] if stage in problem.in_turn else [mine]
        for group in groups:
            for pool, limit in enumerate(problem.pools):
                terms = {
                    program.first[index] + c: float(problem.seats[index].gpus[c])
                    for index in (*group, *own)
                    for c in np.flatnonzero(problem.seats[index].pool == pool).tolist()
                }
                program.add(terms, high=float(limit.num_gpus))


def _memory_rows(problem: Problem, program: Program, equal: dict[tuple[int, int], int]) -> None:
    for pool, limit in enumerate(problem.pools):
        total: dict[int, float] = {}
        transient = program.variable(limit.limit_bytes)
        total[transient] = 1.0
        held = [program.variable(limit.limit_bytes) for _ in range(NUM_STAGES)]
        total.update(dict.fromkeys(held, 1.0))
        together: dict[int, dict[int, float]] = {}
        for index, (first, seat) in enumerate(zip(program.first, problem.seats, strict=True)):
            here = np.flatnonzero(seat.pool == pool).tolist()
            if problem.owns_gpus(index):
                for c in here:
                    if seat.persistent_bytes[c] + seat.transient_bytes[c] > limit.limit_bytes:
                        program.add({first + c: 1.0}, high=0.0)
                continue
            weights = {first + c: -float(seat.persistent_bytes[c]) for c in here}
            weights |= {equal[index, c]: float(seat.persistent_bytes[c]) for c in here if (index, c) in equal}
            if seat.stage in problem.in_turn:
                together.setdefault(seat.stage, {}).update(weights)
            else:
                program.add({held[seat.stage]: 1.0, **weights}, low=0.0)
            program.add(
                {transient: 1.0, **{first + c: -float(seat.transient_bytes[c]) for c in here}}, low=0.0
            )
        for stage, weights in together.items():
            program.add({held[stage]: 1.0, **weights}, low=0.0)
        program.add(total, high=limit.limit_bytes)
