"""The job that a subflow acts on. Flow parameters must be JSON, so a subflow finds its job in the context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from nereus.tasks.job import Job

_job: ContextVar[Job] = ContextVar("job")


def current_job() -> Job:
    """The job of the subflow that runs in this context."""
    return _job.get()


@contextmanager
def subflow_of(job: Job) -> Iterator[None]:
    """Let subflows called inside find `job`.

    A synchronous subflow ends by joining a heartbeat thread that sleeps for a second; the campaign has a
    heartbeat of its own, so the subflow's is switched off.
    """
    token = _job.set(job)
    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield
    finally:
        _job.reset(token)
