"""Seconds of an engine's calls by class of kernel, from a profile of now and then one call.

A profile slows the call that it watches, so it is taken only where everything that profiles have cost stays
below a share of the time in calls. It sees what no hook does: the backward pass, and any engine's kernels.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

SHARE = 0.005  # of the time in calls that profiles may cost
FIRST_COST_S = 0.1  # what a profile is expected to cost before one was taken
EVENT_S = 2e-6  # slowing of a watched call, an event
CLASSES: Mapping[str, re.Pattern[str]] = {
    "collective": re.compile(r"nccl|gloo|c10d|record_param_comms|allreduce|all_?gather|broadcast_", re.I),
    "attention": re.compile(r"attention|flash|fmha", re.I),
    "gemm": re.compile(r"gemm|cutlass|cublas|xmma|::(add|b|badd)?mm\b|::matmul\b|linear", re.I),
}
"""By name of operation or kernel, the first that matches; all others are elementwise."""


def class_of(name: str) -> str:
    """The class of an operation (`aten::addmm`) or kernel."""
    return next((kind for kind, pattern in CLASSES.items() if pattern.search(name)), "elementwise")


@dataclass(kw_only=True)
class KernelTimes:
    """The classes' shares of the calls that were profiled, by what was called. One a worker."""

    device: torch.device
    share: float = SHARE
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of the newest profile of each kind of call; collectives left out, they sum to at most 1."""
    spent_s: float = 0.0
    """What all profiles have cost."""
    watched_s: float = 0.0
    """Time in all calls."""
    _cost_s: float = FIRST_COST_S

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Run a call, and profile it if that can be afforded."""
        start = time.perf_counter()
        if self.spent_s + self._cost_s > self.share * self.watched_s:
            yield
            self.watched_s += time.perf_counter() - start
            return
        activity = ProfilerActivity.CUDA if self.device.type == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as watch:
            begun = time.perf_counter()
            yield
            called_s = time.perf_counter() - begun
        seconds, num_events = self._by_class(watch)
        total = sum(seconds.values())
        if total > 0:
            self.shares[name] = {kind: part / total for kind, part in seconds.items() if kind != "collective"}
        self._cost_s = time.perf_counter() - start - called_s + num_events * EVENT_S
        self.spent_s += self._cost_s
        self.watched_s += called_s

    def _by_class(self, watch: profile) -> tuple[dict[str, float], int]:
        """Seconds of the classes' own time, and how many events there were."""
        on_gpu, seconds, num_events = (
            self.device.type == "cuda",
            dict.fromkeys([*CLASSES, "elementwise"], 0.0),
            0,
        )
        for entry in watch.key_averages():
            own_us = entry.self_device_time_total if on_gpu else entry.self_cpu_time_total
            seconds[class_of(entry.key)] += own_us * 1e-6
            num_events += entry.count
        return seconds, num_events
