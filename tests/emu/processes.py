"""Real processes that run functions on request, for tests of live code.

A fork server that has imported torch makes a new worker in milliseconds, so a killed one is cheap to replace.
Each worker executes one call at a time: `call` starts it, `result` waits for it. Only processes started here
are ever ended.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = mp.get_context("forkserver")
# Imported once, before any thread starts; what is missing here is imported by each worker again.
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "nereus.emu.groups",
        "nereus.emu.reshard",
        "tests.emu.states",
        "tests.emu.faults",
    ]
)


class Died(Exception):
    """The worker's process ended during the call."""


class Raised(Exception):
    """The call raised; the text is the worker's traceback."""


def _serve(worker: int, requests: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = requests.recv()
        except EOFError:
            os._exit(0)
        try:
            requests.send((True, function(worker, *args)))
        except BaseException as error:
            requests.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Workers:
    """Processes by worker id."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._processes: dict[int, Any] = {}
        self._requests: dict[int, Connection] = {}
        for worker in ids:
            self.start(worker)

    def start(self, worker: int) -> None:
        """Start the worker, or replace it by a fresh process."""
        self.end(worker)
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(worker, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[worker], self._requests[worker] = process, ours

    def end(self, worker: int) -> None:
        """End the worker's process, if it runs."""
        process = self._processes.pop(worker, None)
        if process is not None:
            process.kill()
            process.join(10)
            process.close()
            self._requests.pop(worker).close()

    def close(self) -> None:
        """End all."""
        for worker in list(self._processes):
            self.end(worker)

    @property
    def ids(self) -> tuple[int, ...]:
        """The workers, ascending."""
        return tuple(sorted(self._processes))

    def pid(self, worker: int) -> int:
        """The process id of a worker."""
        pid: int = self._processes[worker].pid
        return pid

    def alive(self, worker: int) -> bool:
        """Whether its process still runs."""
        return bool(self._processes[worker].is_alive())

    def call(self, worker: int, function: Callable[..., Any], *args: Any) -> None:
        """Start `function(worker, *args)` there."""
        self._requests[worker].send((function, args))

    def result(self, worker: int, *, timeout_s: float = 60.0) -> Any:
        """The value of its call. Raises Died, Raised, or TimeoutError."""
        end = time.monotonic() + timeout_s
        requests = self._requests[worker]
        try:
            while not requests.poll(min(0.2, max(0.0, end - time.monotonic()))):
                if not self.alive(worker) and not requests.poll(0):
                    raise Died(f"worker {worker} ended")
                if time.monotonic() > end:
                    raise TimeoutError(f"worker {worker} gave no answer in {timeout_s} s")
            good, value = requests.recv()
        except (EOFError, ConnectionError):
            raise Died(f"worker {worker} ended") from None
        if not good:
            raise Raised(f"worker {worker}: {value}")
        return value

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        workers: Iterable[int] | None = None,
        timeout_s: float = 60.0,
    ) -> dict[int, Any]:
        """Run it on all `workers` at once (default: everyone); values by worker."""
        asked = tuple(self.ids if workers is None else workers)
        for worker in asked:
            self.call(worker, function, *args)
        results: dict[int, Any] = {}
        problem: Exception | None = None
        for worker in asked:  # all answers are taken, or the next call would get those of this one
            try:
                results[worker] = self.result(worker, timeout_s=timeout_s)
            except (Died, Raised, TimeoutError) as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return results
