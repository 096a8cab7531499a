"""How much of a step the Prefect server is told, in proportion to the step's length.

A subflow with a task run a stage costs most, one task run a step least (docs/design/tracking.md). `auto`
takes the fullest level that stays below one percent; where none does, so many steps share a task run that it
does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from prefect import Task
from prefect.utilities.annotations import quote

from nereus.config import Tracking

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

COST_S = {Tracking.full: 0.77, Tracking.tasks: 0.43, Tracking.step: 0.027}
ALLOWED_SHARE = 0.01


def unseen(value: R) -> R:
    """The value as a task's argument into which Prefect does not look: the task gets it as it is.

    Prefect looks for futures in all that a task is given, through every dataclass: with a job of 1,000
    prompts for 56 ms of CPU a task run. None of what we give holds any.
    """
    return cast(R, quote(value))


def level(setting: Tracking, last_step_s: float | None) -> Tracking:
    """The level of the next step. Before anything was measured, `auto` shows task runs."""
    if setting != Tracking.auto:
        return setting
    if last_step_s is None:
        return Tracking.tasks
    fitting = (name for name, cost_s in COST_S.items() if cost_s <= ALLOWED_SHARE * last_step_s)
    return next(fitting, Tracking.step)


def steps_a_run(setting: Tracking, last_step_s: float | None) -> int:
    """How many steps share a task run at level `step`: with `auto` as many as keep its share allowed."""
    if setting != Tracking.auto or last_step_s is None:
        return 1
    return max(1, ceil(COST_S[Tracking.step] / (ALLOWED_SHARE * last_step_s)))


class Future(Protocol[R_co]):
    """A result that is being computed."""

    def result(self) -> R_co:
        """Wait for it; raises what the stage raised."""
        ...


@dataclass(frozen=True, slots=True)
class Ready(Generic[R]):
    """A result that is at hand."""

    value: R

    def result(self) -> R:
        """It."""
        return self.value


class Calls(Protocol):
    """Starts stages; concurrent ones are started before the first result is asked for."""

    def start(self, stage: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start a stage and return at once."""
        ...


class TaskRuns:
    """Every stage is a task run of the current flow run."""

    def start(self, stage: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit to the flow's task runner."""
        values = {name: unseen(value) for name, value in kwargs.items()}
        submit: Callable[..., Future[R]] = stage.submit
        return submit(*map(unseen, args), **values)


class PlainCalls:
    """Every stage is a plain call in a thread; the server hears nothing of it."""

    def __init__(self, max_concurrent: int = 4) -> None:
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="stage")

    def start(self, stage: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the stage's function in a thread."""
        function: Callable[..., Any] = stage.fn
        return self._threads.submit(function, *args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True)


class Once:
    """Starts a stage of a step unless an earlier try of that step completed it: then its result is at
    hand.
    """

    def __init__(self, done: dict[str, Any], calls: Calls) -> None:
        self._done, self._calls = done, calls

    def start(self, name: str, stage: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """The result under `name`, or that of the stage, which is kept once it was waited for."""
        if name in self._done:
            return _Kept(self._done, name)
        return _Kept(self._done, name, self._calls.start(stage, *args, **kwargs))


class _Kept(Generic[R]):
    """A result that is kept under a name from when it is known."""

    def __init__(self, done: dict[str, Any], name: str, future: Future[R] | None = None) -> None:
        self._done, self._name, self._future = done, name, future

    def result(self) -> R:
        if self._future is not None:
            self._done[self._name] = self._future.result()
        kept: R = self._done[self._name]
        return kept
