"""A campaign's trace: stages as the driver sees them, calls and collectives as workers do, on one clock.

A worker's clock is compared with the driver's by pings when it is first met: of several the one with the
shortest way there and back counts, and the offset is uncertain by half of that way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nereus.emu.cluster import Call
from nereus.emu.layout import Rank
from nereus.emu.tracing import Span
from nereus.record.listener import Listener
from nereus.record.step import StepRecord
from nereus.record.trace_file import TRACE_FILE, TraceFile
from nereus.tasks.job import Job

DRIVER = 0
PINGS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A worker's clock minus the driver's, and how far off that may be."""

    ns: int
    uncertain_ns: int


def best_offset(pings: list[tuple[int, int, int]]) -> Offset:
    """From (sent, the worker's clock, received) in nanoseconds: that of the shortest way (Cristian 1989)."""
    sent, there, received = min(pings, key=lambda ping: ping[2] - ping[0])
    half = (received - sent) // 2
    return Offset(ns=there - (sent + half), uncertain_ns=half)


class Tracer:
    """A `Listener` that passes everything on and writes what it sees, and what workers tell after a step."""

    def __init__(self, job: Job, inner: Listener, file: TraceFile) -> None:
        self._job, self._inner, self._file = job, inner, file
        self._zero_ns = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._began: dict[tuple[int, str], int] = {}
        self._rows: dict[str, int] = {}
        self._threads: dict[tuple[Rank, int], int] = {}
        self._offsets: dict[Rank, Offset] = {}
        file.name(DRIVER, "driver")

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """Note its beginning, or write its span."""
        now_ns = time.perf_counter_ns()
        with self._lock:
            if seconds is None:
                self._began[step, stage] = now_ns
            elif (start_ns := self._began.pop((step, stage), None)) is not None:
                self._span(DRIVER, self._row(stage), stage, "stage", start_ns, now_ns, {"step": step})
        self._inner.on_stage(step, stage, seconds)

    def on_step(self, record: StepRecord) -> None:
        """Write the step's span, and what the workers saw of it."""
        end_ns = time.perf_counter_ns()
        with self._lock:
            self._span(DRIVER, self._row("step"), f"step {record.step}", "step",
                       end_ns - int(record.step_s * 1e9), end_ns, {"step": record.step})  # fmt: skip
        self._inner.on_step(record)
        self.collect()

    def on_message(self, text: str) -> None:
        """Pass it on."""
        self._inner.on_message(text)

    def collect(self) -> None:
        """Write the spans of all workers; those met for the first time begin to record."""
        ranks = self._job.cluster.ranks
        known = [rank for rank in ranks if rank in self._offsets]
        if known:
            told = self._job.cluster.run(dict.fromkeys(known, Call("take_trace")), what="trace")
            with self._lock:
                for rank, spans in told.items():
                    self._write(rank, spans)
        for rank in ranks:
            if rank not in self._offsets:
                self._meet(rank)

    def _meet(self, rank: Rank) -> None:
        run = self._job.cluster.run
        pings = []
        for _ in range(PINGS):
            sent = time.perf_counter_ns()
            there = run({rank: Call("clock_ns")}, what="trace")[rank]
            pings.append((sent, int(there), time.perf_counter_ns()))
        self._offsets[rank] = best_offset(pings)
        uncertain_us = self._offsets[rank].uncertain_ns / 1e3
        self._file.name(rank + 1, f"worker {rank} (clock ± {uncertain_us:.0f} us)")
        run({rank: Call("begin_trace")}, what="trace")

    def _write(self, rank: Rank, spans: list[Span]) -> None:
        offset_ns = self._offsets[rank].ns
        for span in spans:
            row = self._threads.setdefault((rank, span.thread), len(self._threads))
            self._span(
                rank + 1, row, span.name, span.category, span.start_ns - offset_ns, span.end_ns - offset_ns
            )

    def _row(self, name: str) -> int:
        """Stages may overlap, so each has a row of its own."""
        if name not in self._rows:
            self._rows[name] = len(self._rows)
            self._file.name(DRIVER, name, self._rows[name])
        return self._rows[name]

    def _span(
        self,
        pid: int,
        tid: int,
        name: str,
        category: str,
        start_ns: int,
        end_ns: int,
        args: dict[str, object] | None = None,
    ) -> None:
        start_us, end_us = ((at - self._zero_ns) / 1e3 for at in (start_ns, end_ns))
        self._file.span(pid, tid, name, category, start_us, end_us, args)


@contextmanager
def traced(job: Job) -> Iterator[None]:
    """Write a trace of the body into the run folder, if the campaign asks for one."""
    if not job.config.profile:
        yield
        return
    file = TraceFile(job.config.run_folder / TRACE_FILE)
    inner = job.listener
    tracer = Tracer(job, inner, file)
    tracer.collect()
    job.listener = tracer
    try:
        yield
    finally:
        job.listener = inner
        file.close()
