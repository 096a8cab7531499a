"""Calls of one user's function in processes of its own, with a time limit a call.

      submit --> waiting --+--> [child 1] --> take       a call over its limit: the child is killed by id,
                           +--> [child 2] --> take       a new one starts, the answer is "timeout"
                           ...
      turn: one round of a loop over all pipes, in the caller's thread

The processes are fresh interpreters, not forks: a fork of a process with torch, Ray or gRPC threads can
deadlock, and a copy of the driver would hand its memory to code that reads text of a model.

Where calls are short, a child is sent some ahead, so that it does not wait for the loop between two of them.
It works them off in order, so a call's time begins with the answer to the one before, and a child that is
lost takes one call along: those behind it wait again.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nereus.errors import Cancelled, DataError, explain
from nereus.rewards.child import Child
from nereus.rewards.environment import without_secrets
from nereus.rewards.function import MissingReason

START_LIMIT_S = 300.0  # importing a user's file may load torch from a cold network disk
WAKE_S = (
    0.5  # how often the loop returns to Python code, so that a cancellation raised in this thread gets in
)
AHEAD_S = 0.002  # work that a child is sent at most before it has answered
MOST_AHEAD = 32  # calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A user's function `package.module:function` or `path/to/file.py:function`, and how it is called.

    `kind` says which arguments there are and what may be returned; see `worker.py`. `what` and `key` name it
    in messages: "reward", "reward.function". `arguments` are given to every call besides.
    """

    function: str
    kind: str
    what: str
    key: str
    limit_s: float
    batched: bool = False
    arguments: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a call: a value for each of its requests, or, where `reason` says why, none. `queue_s` is
    how long it waited for a process.
    """

    values: tuple[Any, ...] = ()
    reason: MissingReason | None = None
    detail: str = ""
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLoad:
    """What calls took, summed: their number, seconds of wall clock and of CPU, the longest call's seconds."""

    num_calls: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    longest_s: float = 0.0

    def with_call(self, busy_s: float, cpu_s: float) -> CallLoad:
        """One more call."""
        return CallLoad(
            num_calls=self.num_calls + 1,
            busy_s=self.busy_s + busy_s,
            cpu_s=self.cpu_s + cpu_s,
            longest_s=max(self.longest_s, busy_s),
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """A call that waits or runs: the dataclasses that it is asked, and when it came."""

    key: int
    requests: Sequence[Any]
    came_s: float


@dataclass(slots=True, eq=False)
class _Seat:
    """A place for one child: what it was sent, in order, since when it is at the first, and until when it
    may.
    """

    child: Child
    deadline_s: float
    ready: bool = False
    jobs: deque[_Job] = field(default_factory=deque)
    began_s: float = 0.0


class ProcessPool:
    """At most `num_processes` children that run `target`. Used by one thread at a time; only `resize` may
    come from another one.

    Raises DataError from `turn` when the function can't be loaded, Cancelled once `stop` is set.
    """

    def __init__(self, target: Target, *, num_processes: int, stop: threading.Event | None = None) -> None:
        self._target, self._stop = target, stop or threading.Event()
        self._num_processes = num_processes
        self._environment = without_secrets(os.environ)
        self._seats: list[_Seat] = []
        self._waiting: deque[_Job] = deque()
        self._answers: dict[int, Answer] = {}
        self._load = CallLoad()
        self._typical_s: float | None = None
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that are alive now."""
        return tuple(seat.child.pid for seat in self._seats)

    @property
    def num_processes(self) -> int:
        """How many processes there are to be."""
        return self._num_processes

    @property
    def num_open(self) -> int:
        """Calls that wait or run."""
        return len(self._waiting) + sum(len(seat.jobs) for seat in self._seats)

    def resize(self, num_processes: int) -> None:
        """From the next turn on, so many; a process that works ends its call first."""
        self._num_processes = num_processes

    def take_load(self) -> CallLoad:
        """What calls took since this was last asked."""
        taken, self._load = self._load, CallLoad()
        return taken

    def start(self) -> None:
        """Start the processes and wait until the function is loaded."""
        self._fill()
        while not all(seat.ready for seat in self._seats):
            self.turn(WAKE_S)

    def submit(self, key: int, requests: Sequence[Any]) -> None:
        """Have the function called, with all of the requests if it is batched, else with the only one. Begins
        with the next turn.
        """
        self._waiting.append(_Job(key=key, requests=requests, came_s=time.monotonic()))

    def turn(self, wait_s: float) -> None:
        """Give waiting calls to free processes, and handle what comes within `wait_s`: a line, a free pipe, a
        deadline.
        """
        if self._stop.is_set():
            raise Cancelled(explain(f"stopped while the {self._target.what} function was called"))
        self._fill()
        self._deal()
        active = [seat for seat in self._seats if seat.jobs or not seat.ready]
        if not active:
            return
        left_s = min(seat.deadline_s for seat in active) - time.monotonic()
        with selectors.DefaultSelector() as selector:
            for seat in active:
                selector.register(seat.child.stdout, selectors.EVENT_READ)
                if seat.child.unsent:
                    selector.register(seat.child.stdin, selectors.EVENT_WRITE)
            selector.select(max(0.0, min(left_s, wait_s, WAKE_S)))
        for seat in active:
            seat.child.flush()
            self._handle(seat)

    def take(self) -> dict[int, Answer]:
        """The answers that came since this was last asked, by key."""
        taken, self._answers = self._answers, {}
        return taken

    def drop(self) -> None:
        """Forget all calls. A process that works is killed: it would answer into a later call."""
        self._waiting.clear()
        self._answers.clear()
        for seat in [seat for seat in self._seats if seat.jobs]:
            self._remove(seat)

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for seat in self._seats:
            seat.child.end()
        self._seats.clear()

    def _fill(self) -> None:
        """A child in every empty seat, and no idle one too many."""
        if self._closed:
            raise RuntimeError(f"the {self._target.what} function {self._target.function} is closed")
        while len(self._seats) < self._num_processes:
            child = Child(
                target=self._target.function,
                kind=self._target.kind,
                batched=self._target.batched,
                environment=self._environment,
                arguments=self._target.arguments or {},
            )
            self._seats.append(_Seat(child=child, deadline_s=time.monotonic() + START_LIMIT_S))
        idle = [seat for seat in self._seats if seat.ready and not seat.jobs]
        for seat in idle[: max(0, len(self._seats) - self._num_processes)]:
            self._remove(seat)

    def _deal(self) -> None:
        """Give waiting calls to the ready processes that have the fewest, up to what each may have."""
        most = 1
        if self._typical_s is not None and self._typical_s < AHEAD_S:
            most = min(MOST_AHEAD, int(AHEAD_S / max(self._typical_s, AHEAD_S / MOST_AHEAD)))
        ready = [seat for seat in self._seats if seat.ready]
        for depth in range(most):
            for seat in ready:
                if self._waiting and len(seat.jobs) == depth:
                    self._send(seat, self._waiting.popleft())

    def _send(self, seat: _Seat, job: _Job) -> None:
        seat.jobs.append(job)
        if len(seat.jobs) == 1:
            self._begin(seat)
        seat.child.send({"requests": [_as_dict(request) for request in job.requests]})

    def _begin(self, seat: _Seat) -> None:
        """From now on the child works at the first of its calls."""
        seat.began_s = time.monotonic()
        seat.deadline_s = seat.began_s + self._target.limit_s

    def _handle(self, seat: _Seat) -> None:
        """Take all answers that have come; see whether the child has ended or takes too long."""
        try:
            while (message := seat.child.receive()) is not None:
                self._take(seat, message)
        except EOFError as error:
            self._lose(seat, Answer(reason="exit", detail=str(error)))
            return
        if time.monotonic() >= seat.deadline_s and (seat.jobs or not seat.ready):
            limit_s = self._target.limit_s if seat.ready else START_LIMIT_S
            detail = f"no answer in {limit_s:g} s; process {seat.child.pid} was killed"
            self._lose(seat, Answer(reason="timeout", detail=detail))

    def _take(self, seat: _Seat, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            self._remove(seat)
            raise self._cannot_load(str(message["failed"]))
        if "ready" in message:
            seat.ready = True
        elif "exception" in message:
            answer = Answer(reason="exception", detail=message["exception"])
            self._answer(seat, answer, cpu_s=message["cpu_s"])
        else:
            self._answer(seat, Answer(values=tuple(message["values"])), cpu_s=message["cpu_s"])

    def _answer(self, seat: _Seat, answer: Answer, *, cpu_s: float | None) -> None:
        """The call is over. What a killed process used of the CPU is taken to be all of its time."""
        assert seat.jobs, "an answer is to a call"
        job, busy_s = seat.jobs.popleft(), time.monotonic() - seat.began_s
        self._answers[job.key] = replace(answer, queue_s=seat.began_s - job.came_s)
        self._load = self._load.with_call(busy_s, busy_s if cpu_s is None else cpu_s)
        self._typical_s = busy_s if self._typical_s is None else 0.9 * self._typical_s + 0.1 * busy_s
        if seat.jobs:
            self._begin(seat)

    def _lose(self, seat: _Seat, answer: Answer) -> None:
        """Give up a child, and the call that it was at; those behind wait again. One that never got ready is
        an error of the function.
        """
        self._remove(seat)
        if not seat.ready:
            raise self._cannot_load(answer.detail)
        if seat.jobs:
            self._answer(seat, answer, cpu_s=None)
        self._waiting.extendleft(reversed(seat.jobs))
        seat.jobs.clear()

    def _remove(self, seat: _Seat) -> None:
        seat.child.kill()
        self._seats.remove(seat)

    def _cannot_load(self, detail: str) -> DataError:
        return DataError(
            explain(
                f"cannot load the {self._target.what} function {self._target.function!r}",
                values=detail,
                remedy=f"check {self._target.key}; paths are relative to {Path.cwd()}",
            )
        )


def _as_dict(request: Any) -> dict[str, Any]:
    """The fields by name; their values are JSON already, so none is copied."""
    return {entry.name: getattr(request, entry.name) for entry in fields(request)}
