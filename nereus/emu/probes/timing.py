"""How long a call takes on a device: the median over repeats after a warm-up, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

MIN_REPEATS, MAX_REPEATS = 3, 30


def seconds_of(call: Callable[[], object], device: torch.device, *, budget_s: float = 0.05) -> float:
    """Median seconds of `call`; it is repeated until `budget_s` is spent, at least three times."""
    call()
    _settle(device)
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < MIN_REPEATS or (time.perf_counter() < end and len(taken) < MAX_REPEATS):
        start = time.perf_counter()
        call()
        _settle(device)
        taken.append(time.perf_counter() - start)
    return median(taken)


def queued_seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """Seconds of one of `repeats` calls that are issued one after the other without waiting."""
    call()
    _settle(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _settle(device)
    return (time.perf_counter() - start) / repeats


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
