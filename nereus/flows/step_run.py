"""The task runs of steps, beside the steps: the server hears of them, and no stage waits for that.

    main thread       begin ── step 4 ── step 5 ── step 6 ── end ── step 7
    other threads        └─ run begins ── waits ──────────────┘└─ run ends

Beginning and ending a task run takes some ten milliseconds, much for the step of a small model: so it is done
in other threads, and short steps share a task run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.futures import PrefectFuture

from nereus.flows.tracking import unseen
from nereus.record.step import StepRecord

ENDS_IN_S = 10.0  # the server may be away


class Outcome:
    """How a task run ends: with the record of its last step, or with what a step raised. Set once."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._record: StepRecord | None = None
        self._error: BaseException | None = None

    def complete(self, record: StepRecord) -> None:
        """The steps are done."""
        self._record = record
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """A step raised this."""
        self._error = error
        self._ended.set()

    def result(self) -> StepRecord:
        """Wait for it; raises what the step raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._record is not None, "steps that raised nothing have a record"
        return self._record


@task(name="step", task_run_name="{name}", cache_policy=NO_CACHE)
def step_run(outcome: Outcome, name: str) -> StepRecord:
    """One step or a few, for as long as they take."""
    return outcome.result()


@dataclass
class _Open:
    """A task run that has not been told how it ends."""

    last: int
    begun: Future[PrefectFuture[StepRecord]]
    outcome: Outcome
    record: StepRecord | None = None


class StepRuns:
    """The task runs of a flow run's steps, one after the other. Outside of a flow run nobody is told.

    The flow run waits for them at its own end.
    """

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="step run")

    def step(self, number: int, num: int, act: Callable[[], StepRecord]) -> StepRecord:
        """Take step `number` by `act` within the open task run; within a new one of up to `num` steps where
        none is open.

        Raises what the step raised, once the server knows, if it answers in time.
        """
        if FlowRunContext.get() is None:
            return act()
        run = self._open = self._open or self._begin(number, number + num - 1)
        try:
            run.record = act()
        except BaseException as error:
            self._open = None
            run.outcome.fail(error)
            if run.begun.exception() is None:
                run.begun.result().wait(ENDS_IN_S)
            raise
        if number == run.last:
            self.end()
        return run.record

    def end(self) -> None:
        """End the open task run, if there is one, with the last step that was taken."""
        run, self._open = self._open, None
        if run is not None:
            assert run.record is not None, "a task run is opened by a step, and stays open if that ended well"
            run.outcome.complete(run.record)
            run.begun.result()

    def close(self) -> None:
        """End what is open; no step follows."""
        self.end()
        self._threads.shutdown(wait=True)

    def _begin(self, first: int, last: int) -> _Open:
        outcome = Outcome()
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        begun = self._threads.submit(copy_context().run, step_run.submit, unseen(outcome), name)
        return _Open(last=last, begun=begun, outcome=outcome)
