"""Traces: clocks are compared, off costs one comparison, what is written is strict JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from nereus.emu import tracing
from nereus.emu.engines.torch.clock import Clock, span
from nereus.record.trace_file import TraceFile
from nereus.tasks.trace import best_offset

CPU = torch.device("cpu")


def test_the_shortest_ping_tells_how_far_a_clock_is_off() -> None:
    late, good = (1_000, 90_500, 9_000), (20_000, 110_250, 20_400)
    offset = best_offset([late, good])
    assert (offset.ns, offset.uncertain_ns) == (90_050, 200)


def test_nothing_is_recorded_until_it_is_asked_for() -> None:
    assert tracing.run(lambda x: x + 1, "add", (1,)) == 2
    with Clock(CPU).running(), span("tensor_parallel"):
        pass
    assert tracing.recording() is None
    assert tracing.take() == []


def test_off_adds_less_than_a_microsecond_to_a_call() -> None:
    """The least of many repeats: a busy machine makes some of them longer, and none shorter."""

    def least_s(call: object) -> float:
        assert callable(call)
        best = 1.0
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, time.perf_counter() - start)
        return best / 100

    def bare() -> None:
        return None

    assert least_s(lambda: tracing.run(bare, "bare", ())) - least_s(lambda: bare()) < 1e-6


def test_collectives_lie_inside_the_call_that_makes_them() -> None:
    def step(stage: str) -> str:
        with Clock(CPU).running(), span("tensor_parallel"):
            time.sleep(0.001)
        return stage

    tracing.start(CPU)
    try:
        assert tracing.run(step, "train_step", ("actor.training",)) == "actor.training"
        with pytest.raises(ZeroDivisionError):
            tracing.run(lambda: 1 // 0, "vote", ())
        inner, outer, failed = tracing.take()
        assert tracing.take() == []
    finally:
        tracing.stop()
    assert (outer.name, outer.category) == ("train_step actor.training", "unit")
    assert (inner.name, inner.category) == ("tensor_parallel", "collective")
    assert failed.category == "operation"
    assert outer.start_ns <= inner.start_ns < inner.end_ns <= outer.end_ns
    assert inner.end_ns - inner.start_ns >= 1_000_000


def test_a_trace_file_is_chromes_json(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.name(0, "driver")
    file.span(0, 1, "generate", "stage", 1.5, 3.0, {"step": 2})
    file.close()
    named, event = json.loads(file.path.read_text())
    assert named == {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "driver"}}
    assert (event["ph"], event["ts"], event["dur"], event["args"]) == ("X", 1.5, 1.5, {"step": 2})
