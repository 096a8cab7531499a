"""The listener reaches the threads that run with a copy of the context, and is null by default."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from nereus.record.listener import NullListener, current_listener
from nereus.record.step import StepRecord


class Collect:
    def __init__(self) -> None:
        self.stages: list[tuple[int, str, float | None]] = []

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        self.stages.append((step, stage, seconds))

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_message(self, text: str) -> None:
        pass


def test_nobody_listens_by_default() -> None:
    assert isinstance(current_listener.get(), NullListener)


def test_the_listener_reaches_threads_that_copy_the_context() -> None:
    collect = Collect()
    token = current_listener.set(collect)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                copy_context().run, lambda: current_listener.get().on_stage(1, "generate", None)
            ).result()
    finally:
        current_listener.reset(token)
    assert collect.stages == [(1, "generate", None)]
