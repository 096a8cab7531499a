"""Sums inside an engine whose code is not ours, told to the running clock.

Megatron's layers and DeepSpeed's call `torch.distributed.all_reduce` themselves. All of these sums are
tensor-parallel ones: data parallelism is the number of units, and that is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from nereus.emu.engines.torch.clock import span

NAME = "tensor_parallel"


@contextmanager
def timed_sums() -> Iterator[None]:
    """Inside, every sum tells the clock how long it takes, and how long somebody waits for it."""
    before = dist.all_reduce
    dist.all_reduce = _timed(before)
    try:
        yield
    finally:
        dist.all_reduce = before


class _InFlight:
    """A sum that runs beside a product: the wait at its end counts as communication."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> bool:
        with span(NAME):
            return self._work.wait()


def _timed(all_reduce: Callable[..., dist.Work | None]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> _InFlight | None:
        with span(NAME):
            work = all_reduce(*args, **kwargs)
        return None if work is None else _InFlight(work)

    return told
