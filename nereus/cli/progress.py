"""Listeners that show a running campaign: a live display on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nereus.record.listener import Listener
from nereus.record.step import StepRecord

NUM_RECENT = 10
REFRESHES_PER_S = 5


class Progress(Listener, AbstractContextManager["Progress"], Protocol):
    """A listener that is open while the campaign runs."""


def open_progress(console: Console, *, name: str, num_steps: int, quiet: bool) -> Progress:
    """The listener that fits the console."""
    if quiet:
        return QuietProgress()
    if console.is_terminal:
        return LiveProgress(console, name=name, num_steps=num_steps)
    return PlainProgress(console, num_steps=num_steps)


class Pace:
    """Predicts the time that is left from the last few steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, step_s: float) -> None:
        """Take note of a finished step."""
        self._recent_s.append(step_s)

    def left(self, done: int) -> str:
        """E.g. `3 min 20 s left`; empty before the first step and after the last."""
        if not self._recent_s or done >= self._num_steps:
            return ""
        left_s = (self._num_steps - done) * sum(self._recent_s) / len(self._recent_s)
        return f"{duration(left_s)} left"


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def describe_step(record: StepRecord) -> tuple[str, str]:
    """What the step yielded, and how fast: each fits a line of a narrow terminal."""
    if record.reward_mean is None:
        reward = "reward – (all missing)"
    else:
        reward = f"reward {record.reward_mean:.4g} [{record.reward_min:.4g}, {record.reward_max:.4g}]"
    missing = f", {record.num_missing_rewards} missing" if record.num_missing_rewards else ""
    length = f"length {record.length_mean:.1f} (p95 {record.length_p95:.0f}, max {record.length_max})"
    return f"{reward}{missing}   {length}", f"{record.tokens_per_s:,.0f} tokens/s   {duration(record.step_s)}"


class QuietProgress:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """Do nothing."""

    def on_step(self, record: StepRecord) -> None:
        """Do nothing."""

    def on_message(self, text: str) -> None:
        """Do nothing."""


class PlainProgress(QuietProgress):
    """A line for every step and message: for log files and pipes."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._pace = Pace(num_steps)

    def on_step(self, record: StepRecord) -> None:
        """Print the step."""
        self._pace.add(record.step_s)
        done = record.step + 1
        parts = [f"step {done}/{self._num_steps}", *describe_step(record), self._pace.left(done)]
        self._print("   ".join(part for part in parts if part))

    def on_message(self, text: str) -> None:
        """Print the message."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


class LiveProgress:
    """A bar of steps, the running stages and the last step's numbers, redrawn in place."""

    def __init__(self, console: Console, *, name: str, num_steps: int) -> None:
        self._name, self._num_steps = name, num_steps
        self._pace = Pace(num_steps)
        self._lock = threading.Lock()  # stages that run side by side report from their own threads
        self._running: dict[str, float] = {}
        self._done = 0
        self._last: StepRecord | None = None
        self._message = "starting"
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=REFRESHES_PER_S, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """Show the stage while it runs."""
        with self._lock:
            self._done = step
            self._message = ""
            if seconds is None:
                self._running[stage] = time.monotonic()
            else:
                self._running.pop(stage, None)

    def on_step(self, record: StepRecord) -> None:
        """Show the step's numbers until the next one's."""
        with self._lock:
            self._running.clear()
            self._pace.add(record.step_s)
            self._done, self._last = record.step + 1, record

    def on_message(self, text: str) -> None:
        """Show the message in the place of the stages until one begins."""
        with self._lock:
            self._message = text

    def _draw(self) -> RenderableType:
        with self._lock:
            head = Table.grid(padding=(0, 2), expand=False)
            bar = ProgressBar(total=self._num_steps, completed=self._done, width=30)
            count = f"{self._done}/{self._num_steps} steps"
            head.add_row(Text(self._name, style="bold"), bar, count, self._pace.left(self._done))
            now = time.monotonic()
            stages = [f"{stage} {duration(now - since)}" for stage, since in self._running.items()]
            lines: list[RenderableType] = [
                head,
                Text(f"  {'   '.join(stages) or self._message}", style="cyan"),
            ]
            if self._last is not None:
                lines += [Text(f"  {line}") for line in describe_step(self._last)]
            return Group(*lines)
