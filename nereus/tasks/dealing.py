"""Rows dealt to a model-stage's units in turn, and the way back to their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nereus.emu.cluster import Call
from nereus.emu.layout import Layout
from nereus.tasks.job import Job


def run_dealt(
    job: Job, stage: str, order_b: Tensor, call: Callable[[Tensor], Call], *, what: str
) -> tuple[list[Any], Tensor]:
    """Deal the rows `order_b` to the units of `stage`, one by one in turn, and run `call(rows)` on each unit.

    Returns the units' results and the permutation that puts their joined rows back into the order 0, 1, 2,
    ... A unit that got no row is not called. Where the plan limits how many rows a unit holds at once, the
    rows go in several rounds.
    """
    spec, parts, dealt_rows = job.stages[stage], [], []
    for rows_b in rounds(order_b, len(spec.units), spec.resident_rows):
        dealt = _deal(spec.units, rows_b)
        calls = {rank: one for unit, rows in dealt for one in (call(rows),) for rank in unit.ranks}
        results = job.cluster.run(calls, what=what)
        parts += [results[unit.ranks[0]] for unit, _ in dealt]
        dealt_rows += [rows for _, rows in dealt]
    return parts, torch.argsort(torch.cat(dealt_rows))


def rounds(order_b: Tensor, num_units: int, resident_rows: int | None) -> tuple[Tensor, ...]:
    """Consecutive parts of the rows such that no unit gets more than `resident_rows` of one."""
    if resident_rows is None:
        return (order_b,)
    return tuple(torch.split(order_b, resident_rows * num_units))


def _deal(units: tuple[Layout, ...], rows_b: Tensor) -> list[tuple[Layout, Tensor]]:
    return [(unit, rows_b[i :: len(units)]) for i, unit in enumerate(units) if i < len(rows_b)]
