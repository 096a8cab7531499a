"""Spans of this process for a trace: calls of the worker and collectives inside them; NVTX ranges on GPUs.

Nothing is recorded until `start`; until then every place that could tell of a span does one comparison. Times
are nanoseconds of this process's own clock; who puts several processes into one picture measures how far the
clocks are apart (`clock_ns`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of time of one thread. `category` is `unit`, `operation` or `collective`."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: int


@dataclass(kw_only=True)
class Recorder:
    """The spans of this process since they were last taken."""

    nvtx: bool
    _spans: list[Span] = field(default_factory=list)

    def begin(self, name: str) -> int:
        """The start of a span; on a GPU also of an NVTX range of this thread."""
        if self.nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        return clock_ns()

    def end(self, name: str, category: str, start_ns: int) -> None:
        """The end of the span that began then. On a GPU that is when its kernels were issued."""
        end_ns = clock_ns()
        if self.nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._spans.append(
            Span(name=name, category=category, start_ns=start_ns, end_ns=end_ns, thread=threading.get_ident())
        )

    def take(self) -> list[Span]:
        """The spans, which are forgotten here."""
        taken, self._spans = self._spans, []
        return taken


_recorder: Recorder | None = None
OPERATIONS = frozenset({"prepare_operation", "apply_decision", "vote", "begin_transition"})


def start(device: torch.device) -> None:
    """Record from here on."""
    global _recorder
    _recorder = Recorder(nvtx=device.type == "cuda")


def stop() -> list[Span]:
    """Record no longer; returns what was not taken yet."""
    global _recorder
    left, _recorder = ([] if _recorder is None else _recorder.take()), None
    return left


def recording() -> Recorder | None:
    """The recorder of this process, None while nothing is recorded."""
    return _recorder


def take() -> list[Span]:
    """The spans since this was last asked; none while nothing is recorded."""
    return [] if _recorder is None else _recorder.take()


def clock_ns() -> int:
    """This process's clock."""
    return time.perf_counter_ns()


def run(function: Callable[..., Any], method: str, arguments: tuple[object, ...]) -> Any:
    """Call a worker's method; its span has the model-stage in its name where that is the first argument."""
    recorder = _recorder
    if recorder is None:
        return function(*arguments)
    stage = arguments[0] if arguments and isinstance(arguments[0], str) else None
    name = method if stage is None else f"{method} {stage}"
    start_ns = recorder.begin(name)
    try:
        return function(*arguments)
    finally:
        recorder.end(name, "operation" if method in OPERATIONS else "unit", start_ns)
