"""The task run of a step, beside the step: the server hears of it, and no stage waits for that.

    main thread    submit ── the step's stages ──────────── outcome ── next step
    pool thread           └─ run begins ── waits ─────────────┘└─ run ends

Beginning and ending a task run takes some ten milliseconds, much for the step of a small model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from nereus.flows.tracking import unseen
from nereus.record.step import StepRecord

ENDS_IN_S = 10.0  # the server may be away


class Outcome:
    """How a step ended: its record, or what it raised. Set once."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._record: StepRecord | None = None
        self._error: BaseException | None = None

    def complete(self, record: StepRecord) -> None:
        """The step is done."""
        self._record = record
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """The step raised this."""
        self._error = error
        self._ended.set()

    def result(self) -> StepRecord:
        """Wait for it; raises what the step raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._record is not None, "a step that raised nothing has a record"
        return self._record


@task(name="step", task_run_name="step {number}", cache_policy=NO_CACHE)
def step_run(outcome: Outcome, number: int) -> StepRecord:
    """Step `number`, for as long as it takes."""
    return outcome.result()


@contextmanager
def told(number: int) -> Iterator[Outcome]:
    """Let step `number` be a task run of the current flow run; inside, the step is run and its outcome set.

    The task run ends as the step does, a little later; the flow run waits for it at its own end, and here
    where the step raised. Outside of a flow run nobody is told.
    """
    outcome = Outcome()
    if FlowRunContext.get() is None:
        yield outcome
        return
    run = step_run.submit(unseen(outcome), number)
    try:
        yield outcome
    except BaseException as error:
        outcome.fail(error)
        run.wait(ENDS_IN_S)
        raise
