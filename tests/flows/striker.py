"""A listener that acts when a stage of a step begins, e.g. kills a worker."""

from __future__ import annotations

from collections.abc import Callable

import ray


class Striker:
    """Calls `strike(step, stage)` at the beginning of every stage."""

    def __init__(self, strike: Callable[[int, str], None]) -> None:
        self._strike = strike

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        if seconds is None:
            self._strike(step, stage)

    def on_step(self, record: object) -> None:
        pass

    def on_message(self, text: str) -> None:
        pass


def free_gpus() -> float:
    """Logical GPUs of the test's Ray that nobody holds; Ray counts one free a little after it is."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free.get("GPU", 0.0)
