"""The seam of rewards that are functions of text: what is asked, what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

MissingReason = Literal["exception", "timeout", "exit", "invalid", "none"]
"""Why a reward is missing: the function raised; ran out of time; took its process down; returned something
that is no finite number; returned None, which is how a function declines.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One response to score. `turns` are the texts that the model wrote, one where no tools came in between;
    `response` is all that follows the prompt, what tools said among it. `ground_truth` and `extra` are the
    prompt's, as JSON values.
    """

    sample_id: int
    prompt: str
    response: str
    response_token_ids: tuple[int, ...]
    turns: tuple[str, ...] = ()
    ground_truth: Json = None
    extra: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward, or why there is none: `value` is None exactly where `reason` is not. `detail` is for
    people; `queue_s` is how long the response waited before its scoring began, seconds.
    """

    value: float | None
    reason: MissingReason | None = None
    detail: str = ""
    queue_s: float = 0.0

    def __post_init__(self) -> None:
        assert (self.value is None) == (self.reason is not None), f"{self} must have a value or a reason"


class RewardFunction(Protocol):
    """Scores responses. A missing reward is a result, never an exception: one bad response must not end a
    job.
    """

    def score(self, requests: Sequence[RewardRequest]) -> tuple[RewardResult, ...]:
        """One result for each request, in their order."""
        ...

    def close(self) -> None:
        """Give back processes and files. Further calls are errors."""
        ...


def missing_by_reason(results: Sequence[RewardResult]) -> dict[MissingReason, int]:
    """How many rewards are missing, by reason; for metrics and the progress display."""
    return dict(Counter(result.reason for result in results if result.reason is not None))


def first_missing(results: Sequence[RewardResult]) -> str:
    """Reason and detail of the first missing reward, or nothing: what a person needs to find the defect."""
    return next((f"{result.reason}: {result.detail}" for result in results if result.reason is not None), "")
