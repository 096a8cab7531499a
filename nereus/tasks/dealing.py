"""Rows dealt to a model-stage's units in turn, and the way back to their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nereus.emu.cluster import Answer, Call
from nereus.emu.layout import Layout, Rank
from nereus.tasks.early import Early
from nereus.tasks.job import Job


def run_dealt(
    job: Job,
    stage: str,
    order_b: Tensor,
    call: Callable[[Tensor], Call],
    *,
    what: str,
    early: Early | None = None,
) -> tuple[list[Any], Tensor]:
    """Deal the rows `order_b` to the units of `stage`, one by one in turn, and run `call(rows)` on each unit.

    Returns the units' results and the permutation that puts their joined rows back into the order 0, 1, 2,
    ... A unit that got no row is not called. Where the plan limits how many rows a unit holds at once, the
    rows go in several rounds. With `early` the results are rollouts, and units that end score those of the
    last round.
    """
    spec, parts, dealt_rows = job.stages[stage], [], []
    in_rounds = rounds(order_b, len(spec.units), spec.resident_rows)
    for number, rows_b in enumerate(in_rounds, start=1):
        dealt = _deal(spec.units, rows_b)
        calls = {rank: one for unit, rows in dealt for one in (call(rows),) for rank in unit.ranks}
        if early is None:
            results = job.cluster.run(calls, what=what)
        else:
            is_last = number == len(in_rounds)
            for unit in spec.units[len(dealt) :] if is_last else ():
                early.end(unit)  # it gets no rows
            results = _run_early(job, dealt, calls, early, what=what, is_last=is_last)
        parts += [results[unit.ranks[0]] for unit, _ in dealt]
        dealt_rows += [rows for _, rows in dealt]
    return parts, torch.argsort(torch.cat(dealt_rows))


def _run_early(
    job: Job,
    dealt: Sequence[tuple[Layout, Tensor]],
    calls: Mapping[Rank, Call],
    early: Early,
    *,
    what: str,
    is_last: bool,
) -> dict[Rank, Any]:
    """One round of generation whose units are told of to `early` as they end."""
    results: dict[Rank, Any] = {}
    of_rank = {unit.ranks[0]: (unit, rows_n.tolist()) for unit, rows_n in dealt}

    def then(answer: Answer) -> Mapping[Rank, Call]:
        results[answer.rank] = answer.result
        if answer.rank in of_rank:
            unit, numbers = of_rank[answer.rank]
            early.take_rows(unit, numbers, answer.result.batch)
            if is_last:
                early.end(unit)
        return {}

    job.cluster.converse(calls, early.beside(then), what=what)
    return results


def rounds(order_b: Tensor, num_units: int, resident_rows: int | None) -> tuple[Tensor, ...]:
    """Consecutive parts of the rows such that no unit gets more than `resident_rows` of one."""
    if resident_rows is None:
        return (order_b,)
    return tuple(torch.split(order_b, resident_rows * num_units))


def _deal(units: tuple[Layout, ...], rows_b: Tensor) -> list[tuple[Layout, Tensor]]:
    return [(unit, rows_b[i :: len(units)]) for i, unit in enumerate(units) if i < len(rows_b)]
