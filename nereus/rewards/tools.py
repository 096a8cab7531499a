"""The user's tools: a function that reads what the model wrote in its turn and says what it reads next.

Called in processes of its own, see `pool.py`, so that a tool that hangs or crashes costs its own row only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus.rewards.function import Json, MissingReason
from nereus.rewards.pool import Answer, CallLoad, ProcessPool, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """One turn of the model that has ended. `turn` is its text, `turns` are those of all of the model's turns
    so far, `response` is everything after the prompt, observations among it. `state` is what the function
    returned as such after the turn before, None at first. `ground_truth` and `extra` are the prompt's.
    """

    sample_id: int
    prompt: str
    response: str
    turn: str
    turns: tuple[str, ...]
    state: Json = None
    ground_truth: Json = None
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the model reads next; `text` None ends its response. `reason` says why a tool said nothing, where
    it failed: the text then says so to the model, without the detail, which is for people.
    """

    text: str | None
    state: Json = None
    reason: MissingReason | None = None
    detail: str = ""


class Tools:
    """The function in up to `num_processes` processes. `results` is to be asked again and again; between that
    nothing happens here, while the processes work.
    """

    def __init__(
        self, *, target: str, limit_s: float, num_processes: int = 1, stop: threading.Event | None = None
    ) -> None:
        function = Target(function=target, kind="tool", what="tool", key="tools.function", limit_s=limit_s)
        self.pool = ProcessPool(function, num_processes=num_processes, stop=stop)
        self._failures: Counter[str] = Counter()
        self.first_failure = ""

    @property
    def num_away(self) -> int:
        """Calls whose observations have not been taken."""
        return self.pool.num_open

    def submit(self, key: int, request: ToolRequest) -> None:
        """Call the function on a turn; `key` names it among the results."""
        self.pool.submit(key, [request])

    def results(self, *, wait_s: float) -> dict[int, Observation]:
        """The observations that came, by key; waits up to `wait_s` for something to come. Raises DataError
        where the function cannot be loaded, Cancelled when the stop flag is set.
        """
        self.pool.turn(0.0)
        found = self.pool.take()
        if not found and wait_s > 0:
            self.pool.turn(wait_s)
            found = self.pool.take()
        return {key: self._observation(answer) for key, answer in found.items()}

    def drop(self) -> None:
        """Forget all calls."""
        self.pool.drop()

    def take_failures(self) -> dict[str, int]:
        """How many calls failed since this was last asked, by reason."""
        taken, self._failures = dict(self._failures), Counter()
        return taken

    def take_load(self) -> CallLoad:
        """What calls took since this was last asked."""
        return self.pool.take_load()

    def __enter__(self) -> Tools:
        self.pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def _observation(self, answer: Answer) -> Observation:
        told = answer
        if answer.reason is None:
            (value,) = answer.values
            if "invalid" not in value:
                return Observation(text=value["text"], state=value["state"])
            told = Answer(reason="invalid", detail=value["invalid"])
        assert told.reason is not None, "a failure has a reason"
        self._failures[told.reason] += 1
        self.first_failure = self.first_failure or f"{told.reason}: {told.detail}"
        return Observation(text=f"error: {told.reason}", reason=told.reason, detail=told.detail)
