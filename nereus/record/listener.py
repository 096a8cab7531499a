"""How a running campaign tells whoever watches it what happens: a protocol and a context variable.

The flow calls `current_listener.get()`; the command line sets a live display there. A listener is called from
several threads, and must neither block nor raise.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from nereus.record.step import StepRecord


class Listener(Protocol):
    """Watches a campaign."""

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """A stage began (`seconds` is None) or ended after so many seconds."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """A step ended."""
        ...

    def on_message(self, text: str) -> None:
        """Something happened that the user should read once."""
        ...


class NullListener:
    """Watches nothing."""

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """Do nothing."""

    def on_step(self, record: StepRecord) -> None:
        """Do nothing."""

    def on_message(self, text: str) -> None:
        """Do nothing."""


current_listener: ContextVar[Listener] = ContextVar("current_listener", default=NullListener())  # noqa: B039
