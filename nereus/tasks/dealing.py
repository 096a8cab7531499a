"""Rows dealt to a model-stage's units in turn, and the way back to their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nereus.emu.cluster import Call
from nereus.tasks.job import Job


def run_dealt(
    job: Job, stage: str, order_b: Tensor, call: Callable[[Tensor], Call], *, what: str
) -> tuple[list[Any], Tensor]:
    """Deal the rows `order_b` to the units of `stage`, one by one in turn, and run `call(rows)` on each unit.

    Returns the units' results and the permutation that puts their joined rows back into the order 0, 1, 2,
    ... A unit that got no row is not called.
    """
    units = job.stages[stage].units
    dealt = [(unit, order_b[i :: len(units)]) for i, unit in enumerate(units) if i < len(order_b)]
    calls = {rank: one for unit, rows in dealt for one in (call(rows),) for rank in unit.ranks}
    results = job.cluster.run(calls, what=what)
    parts = [results[unit.ranks[0]] for unit, _ in dealt]
    return parts, torch.argsort(torch.cat([rows for _, rows in dealt]))
