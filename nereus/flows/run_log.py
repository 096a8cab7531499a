"""What a campaign tells its watcher, as log lines of its Prefect flow run: for runs that no terminal
watches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger, LoggerAdapter

from prefect.logging import get_run_logger

from nereus.record.listener import NullListener, current_listener
from nereus.record.step import StepRecord


class RunLog:
    """A `Listener` that logs messages, and a line for every step."""

    def __init__(self, logger: Logger | LoggerAdapter[Logger]) -> None:
        self._logger = logger

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """Stages are task runs already."""

    def on_step(self, record: StepRecord) -> None:
        """One line with what people look at first."""
        reward = "none" if record.reward_mean is None else f"{record.reward_mean:.4g}"
        self._logger.info(
            "step %d: reward %s, length %.1f, %.2f s", record.step, reward, record.length_mean, record.step_s
        )

    def on_message(self, text: str) -> None:
        """Log it."""
        self._logger.info(text)


@contextmanager
def logged() -> Iterator[None]:
    """Log to the current flow run what nobody else listens to."""
    if not isinstance(current_listener.get(), NullListener):
        yield
        return
    token = current_listener.set(RunLog(get_run_logger()))
    try:
        yield
    finally:
        current_listener.reset(token)
