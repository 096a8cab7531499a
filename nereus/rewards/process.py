"""A Python function as a reward, run in processes of its own with a time limit a call; see `pool.py`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nereus.rewards.function import RewardRequest, RewardResult
from nereus.rewards.pool import WAKE_S, Answer, ProcessPool, Target


class ProcessReward:
    """Implements `RewardFunction`.

    `target` is `package.module:function` or `path/to/file.py:function`. The function takes any of prompt,
    response, response_token_ids, turns, ground_truth, extra, sample_id by name, and returns a number or None;
    with `batched` it takes lists and returns as many numbers. Functions written for verl (data_source,
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
        self._batched = batched
        self.pool = ProcessPool(
            Target(
                function=target,
                kind="reward",
                what="reward",
                key="reward.function",
                limit_s=limit_s,
                batched=batched,
                arguments=arguments,
            ),
            num_processes=1 if batched else num_processes,
            stop=stop,
        )
        self._lock = threading.Lock()

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that are alive now."""
        return self.pool.pids

    def start(self) -> None:
        """Start the processes and wait until the function is loaded. Raises DataError if it can't be."""
        with self._lock:
            self.pool.start()

    def score(self, requests: Sequence[RewardRequest]) -> tuple[RewardResult, ...]:
        """One result for each request, in order; see `RewardFunction`. Raises DataError if the function can't
        be loaded, Cancelled when the stop flag is set.
        """
        calls = [requests] if self._batched and requests else [[request] for request in requests]
        with self._lock:
            answers: dict[int, Answer] = {}
            try:
                for number, call in enumerate(calls):
                    self.pool.submit(number, call)
                while len(answers) < len(calls):
                    self.pool.turn(WAKE_S)
                    answers |= self.pool.take()
            finally:  # nothing is left, but after an exception
                self.pool.drop()
        return tuple(
            result for number, call in enumerate(calls) for result in _results(answers[number], len(call))
        )

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self.pool.close()

    def __enter__(self) -> ProcessReward:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _results(answer: Answer, num_requests: int) -> list[RewardResult]:
    """The results that the answer to a call stands for."""
    if answer.reason is not None:
        missing = RewardResult(value=None, reason=answer.reason, detail=answer.detail, queue_s=answer.queue_s)
        return [missing] * num_requests
    return [replace(_result(value), queue_s=answer.queue_s) for value in answer.values]


def _result(value: float | dict[str, str] | None) -> RewardResult:
    if value is None:
        return RewardResult(value=None, reason="none", detail="the function returned None")
    if isinstance(value, dict):
        return RewardResult(value=None, reason="invalid", detail=value["invalid"])
    return RewardResult(value=value)
