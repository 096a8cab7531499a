"""Where a step's rows come from: drawn in turn with training, or by a generation that runs ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

from nereus.flows.gather import Gathered, gather
from nereus.flows.tracking import Once
from nereus.tasks.job import CampaignState, Job


class RowSource(Protocol):
    """Rows for every step, and the times at which generation rests, so that weights and workers may move."""

    def rows(self, job: Job, once: Once) -> Gathered:
        """The rows of the job's step; the same ones when that is tried again."""
        ...

    def weight_sync(self, job: Job) -> AbstractContextManager[bool]:
        """The end of a step: inside, generation rests if it says True. If False, it goes on with the weights
        that it has, and the sync is left out.
        """
        ...

    def advance(self, state: CampaignState, *, synced: bool) -> None:
        """The job is in this state; if `synced`, generation has its weights. Only where generation rests."""
        ...

    def at_rest(self) -> AbstractContextManager[None]:
        """Inside, generation rests. It waits for that."""
        ...

    @property
    def rests(self) -> bool:
        """Whether generation is at rest already, and stays so until `go_on`."""
        ...

    def rest_next(self) -> None:
        """Keep generation at rest from the next weight sync on, until `go_on`: something is to move there."""
        ...

    def go_on(self) -> None:
        """Keep generation at rest no longer; also when rows are asked for."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that `at_rest` has waited so far."""
        ...

    def version(self, job: Job) -> int:
        """The version of the policy that generation has; only inside `at_rest`."""
        ...

    def recover(self) -> None:
        """The job has recovered from a loss, maybe to an earlier step; only inside `at_rest`."""
        ...


class InTurn:
    """The synchronous source: rows are drawn when a step asks for them, so between steps generation rests."""

    def rows(self, job: Job, once: Once) -> Gathered:
        """Draw them now."""
        return gather(job, once)

    @contextmanager
    def weight_sync(self, job: Job) -> Iterator[bool]:
        """It rests."""
        yield True

    def advance(self, state: CampaignState, *, synced: bool) -> None:
        """Nobody runs ahead."""

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """It rests."""
        yield

    @property
    def rests(self) -> bool:
        """It rests."""
        return True

    def rest_next(self) -> None:
        """It will."""

    def go_on(self) -> None:
        """It goes on when it is asked for rows."""

    @property
    def waited_s(self) -> float:
        """There is nothing to wait for."""
        return 0.0

    def version(self, job: Job) -> int:
        """The newest: every step ends with a sync."""
        return job.state.policy_version

    def recover(self) -> None:
        """Nothing was drawn ahead."""


_source: ContextVar[RowSource] = ContextVar("row source", default=InTurn())  # noqa: B039


def current_source() -> RowSource:
    """The source of the campaign that runs in this context."""
    return _source.get()


@contextmanager
def rows_from(source: RowSource) -> Iterator[None]:
    """Let steps, transitions and recoveries inside use this source."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)
