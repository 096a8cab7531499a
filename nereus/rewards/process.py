"""A Python function as a reward, run in processes of its own with a time limit a call.

      score() --- one loop over pipes, one thread -----------------------------
        request --> [child 1] --> result       a call over its limit: the child is killed by id,
        request --> [child 2] --> result       a new one starts, the result is "timeout"
        ...

The processes are fresh interpreters, not forks: a fork of a process with torch, Ray or gRPC threads can
deadlock, and a copy of the driver would hand its memory to code that reads text of a model.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nereus.errors import Cancelled, DataError, explain
from nereus.rewards.child import Child
from nereus.rewards.environment import without_secrets
from nereus.rewards.function import RewardRequest, RewardResult

START_LIMIT_S = 300.0  # importing a user's file may load torch from a cold network disk
WAKE_S = (
    0.5  # how often the loop returns to Python code, so that a cancellation raised in this thread gets in
)


@dataclass(slots=True, eq=False)
class _Seat:
    """A place for one child: what it is doing, and until when it may."""

    child: Child
    deadline_s: float
    ready: bool = False
    job: tuple[int, ...] = field(default=())  # indices of the requests being scored; empty when idle


class ProcessReward:
    """Implements `RewardFunction`.

    `target` is `package.module:function` or `path/to/file.py:function`. The function takes any of prompt,
    response, response_token_ids, ground_truth, extra, sample_id by name, and returns a number or None; with
    `batched` it takes lists and returns as many numbers. Functions written for verl (data_source,
    solution_str, ground_truth, extra_info) work as they are.

    One call may take `limit_s` seconds; loading the function is not counted. Responses are scored in no
    particular order by up to `num_processes` processes; a batched function gets all of them in one call in
    one process. `arguments` are given to every call besides. Once `stop` is set, calls under way end within
    half a second.
    """

    def __init__(
        self,
        *,
        target: str,
        limit_s: float,
        num_processes: int = 1,
        batched: bool = False,
        arguments: Mapping[str, object] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._arguments = {} if arguments is None else dict(arguments)
        self._target, self._batched, self._limit_s = target, batched, limit_s
        self._num_processes = 1 if batched else num_processes
        self._environment = without_secrets(os.environ)
        self._seats: list[_Seat] = []
        self._lock = threading.Lock()
        self._closed = False
        self._stop = stop or threading.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that are alive now."""
        return tuple(seat.child.pid for seat in self._seats)

    def start(self) -> None:
        """Start the processes and wait until the function is loaded. Raises DataError if it can't be."""
        with self._lock:
            self._fill()
            while not all(seat.ready for seat in self._seats):
                self._turn([])

    def score(self, requests: Sequence[RewardRequest]) -> tuple[RewardResult, ...]:
        """One result for each request, in order; see `RewardFunction`. Raises DataError if the function can't
        be loaded, Cancelled when the stop flag is set.
        """
        with self._lock:
            results: list[RewardResult | None] = [None] * len(requests)
            queue_s, began_s = [0.0] * len(requests), time.monotonic()
            indices = range(len(requests))
            waiting = deque([tuple(indices)] if self._batched and requests else [(i,) for i in indices])
            try:
                while waiting or any(seat.job for seat in self._seats):
                    if self._stop.is_set():
                        raise Cancelled(explain("stopped while rewards were computed"))
                    self._fill()
                    for seat in self._seats:
                        if waiting and seat.ready and not seat.job:
                            job = waiting.popleft()
                            for index in job:
                                queue_s[index] = time.monotonic() - began_s
                            self._send(seat, job, requests)
                    self._turn(results)
            finally:  # after an exception a busy child would answer into the next call
                for seat in [seat for seat in self._seats if seat.job]:
                    self._remove(seat)
        return tuple(
            replace(result, queue_s=waited_s)
            for result, waited_s in zip(results, queue_s, strict=True)
            if result is not None
        )

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            for seat in self._seats:
                seat.child.end()
            self._seats.clear()

    def __enter__(self) -> ProcessReward:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        """Put a child in every empty seat."""
        if self._closed:
            raise RuntimeError(f"the reward {self._target} is closed")
        while len(self._seats) < self._num_processes:
            child = Child(
                target=self._target,
                batched=self._batched,
                environment=self._environment,
                arguments=self._arguments,
            )
            self._seats.append(_Seat(child=child, deadline_s=time.monotonic() + START_LIMIT_S))

    def _send(self, seat: _Seat, job: tuple[int, ...], requests: Sequence[RewardRequest]) -> None:
        seat.job, seat.deadline_s = job, time.monotonic() + self._limit_s
        seat.child.send({"requests": [asdict(requests[i]) for i in job]})

    def _turn(self, results: list[RewardResult | None]) -> None:
        """Wait for a line, a free pipe, a deadline or `WAKE_S`, and handle what came."""
        active = [seat for seat in self._seats if seat.job or not seat.ready]
        left_s = min((seat.deadline_s for seat in active), default=0.0) - time.monotonic()
        with selectors.DefaultSelector() as selector:
            for seat in active:
                selector.register(seat.child.stdout, selectors.EVENT_READ)
                if seat.child.unsent:
                    selector.register(seat.child.stdin, selectors.EVENT_WRITE)
            selector.select(max(0.0, min(left_s, WAKE_S)))
        for seat in active:
            seat.child.flush()
            self._handle(seat, results)

    def _handle(self, seat: _Seat, results: list[RewardResult | None]) -> None:
        try:
            message = seat.child.receive()
        except EOFError as error:
            self._lose(seat, RewardResult(value=None, reason="exit", detail=str(error)), results)
            return
        if message is None:
            if time.monotonic() >= seat.deadline_s:
                limit_s = self._limit_s if seat.ready else START_LIMIT_S
                detail = f"no answer in {limit_s:g} s; process {seat.child.pid} was killed"
                self._lose(seat, RewardResult(value=None, reason="timeout", detail=detail), results)
        elif "failed" in message:
            self._remove(seat)
            raise self._cannot_load(str(message["failed"]))
        elif "ready" in message:
            seat.ready = True
        else:
            for index, result in zip(seat.job, _results(message, len(seat.job)), strict=True):
                results[index] = result
            seat.job = ()

    def _lose(self, seat: _Seat, result: RewardResult, results: list[RewardResult | None]) -> None:
        """Give up a child: its job's rewards are missing. One that never got ready is an error of the
        function.
        """
        self._remove(seat)
        if not seat.ready:
            raise self._cannot_load(result.detail)
        for index in seat.job:
            results[index] = result

    def _remove(self, seat: _Seat) -> None:
        seat.child.kill()
        self._seats.remove(seat)

    def _cannot_load(self, detail: str) -> DataError:
        return DataError(
            explain(
                f"cannot load the reward {self._target!r}",
                values=detail,
                remedy=f"check reward.function; paths are relative to {Path.cwd()}",
            )
        )


def _results(message: dict[str, Any], num_requests: int) -> list[RewardResult]:
    """The results that a worker's reply stands for."""
    if "exception" in message:
        return [RewardResult(value=None, reason="exception", detail=message["exception"])] * num_requests
    return [_result(value) for value in message["values"]]


def _result(value: float | dict[str, str] | None) -> RewardResult:
    if value is None:
        return RewardResult(value=None, reason="none", detail="the function returned None")
    if isinstance(value, dict):
        return RewardResult(value=None, reason="invalid", detail=value["invalid"])
    return RewardResult(value=value)
