"""What a worker's calls took, by model-stage and term: collectives always, kernel classes from profiles."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from nereus.emu.engines.torch.clock import COLLECTIVES as COLLECTIVES
from nereus.emu.engines.torch.clock import Clock
from nereus.emu.kernel_times import KernelTimes

TOTAL = "total"
Terms = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a worker has to tell after a step: peak memory, and seconds by call (`stage/method`) and term."""

    peak_bytes: int
    terms: Mapping[str, Terms]


@dataclass(kw_only=True)
class Timings:
    """Times the calls of one worker."""

    device: torch.device
    kernels: KernelTimes = field(init=False)
    _seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.kernels = KernelTimes(device=self.device)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Time a call; nothing is recorded when it raises."""
        clock, start = Clock(self.device), time.perf_counter()
        with self.kernels.around(name), clock.running():
            yield
        known = self._seconds[name]
        for term, seconds in {**clock.seconds, TOTAL: time.perf_counter() - start}.items():
            known[term] = known.get(term, 0.0) + seconds

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds by call and term since this was last asked. A class's seconds are its share of the newest
        profile, of the time in calls that no collective took.
        """
        taken, self._seconds = dict(self._seconds), defaultdict(dict)
        for name, known in taken.items():
            busy_s = known[TOTAL] - sum(known.get(term, 0.0) for term in COLLECTIVES)
            shares = self.kernels.shares.get(name, {})
            whole = sum(shares.values())
            if whole > 0:
                known |= {kind: busy_s * share / whole for kind, share in shares.items()}
                # To a profile the optimizer is elementwise work; its own span knows better.
                known["elementwise"] = max(0.0, known["elementwise"] - known.get("optimizer", 0.0))
        return taken
