"""Seconds by phase of a step, and of the collectives inside any call of an engine.

A clock that is `running` is told of every `span` of this process, from whatever thread: the backward pass on
a GPU has one of its own. On a GPU a span is measured by events on its stream, which wait for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nereus.emu.tracing import recording

COLLECTIVES = ("tensor_parallel", "expert_parallel", "context_parallel", "data_parallel")

_running: list[Clock] = []


class _Open(threading.local):
    """The names of the spans that this thread is in."""

    def __init__(self) -> None:
        self.names: list[str] = []


_open = _Open()


class Clock:
    """`with clock.phase(name):` adds to `seconds[name]`; on a GPU a phase ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; nothing is recorded when it raises."""
        start = time.perf_counter()
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._add(name, time.perf_counter() - start)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be told of every span in the body."""
        _running.append(self)
        try:
            yield
        finally:
            _running.remove(self)
        if self._events:
            torch.accelerator.synchronize(self._device)
            for name, begun, ended in self._events:
                self._add(name, begun.elapsed_time(ended) / 1e3)
            self._events.clear()

    def begin(self) -> float | torch.cuda.Event:
        """The start of a span."""
        if self._device.type != "cuda":
            return time.perf_counter()
        return _event()

    def end(self, name: str, begun: float | torch.cuda.Event) -> None:
        """The end of a span."""
        if isinstance(begun, float):
            self._add(name, time.perf_counter() - begun)
        else:
            self._events.append((name, begun, _event()))

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def span(name: str) -> Iterator[None]:
    """Tell the clock that runs, if one does, how long the body takes; a body that raises is not told of.

    A span inside one of the same name is part of it.
    """
    if not _running or name in _open.names:
        yield
        return
    clock, recorder = _running[-1], recording()
    start_ns = 0 if recorder is None else recorder.begin(name)
    begun = clock.begin()
    _open.names.append(name)
    try:
        yield
    finally:
        _open.names.remove(name)
    clock.end(name, begun)
    if recorder is not None:
        recorder.end(name, "collective" if name in COLLECTIVES else "unit", start_ns)
