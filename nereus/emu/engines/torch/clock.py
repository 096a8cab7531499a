"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """`with clock.phase(name):` adds to `seconds[name]`; on a GPU a phase ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; nothing is recorded when it raises."""
        start = time.perf_counter()
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
