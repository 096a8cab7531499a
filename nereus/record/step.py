"""What one step of a campaign amounted to: `StepRecord`, and its form as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus.errors import DataError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The numbers of one finished step. Durations are seconds on the driver's clock, sizes are bytes."""

    step: int
    """Number of the step, counted from 0."""
    version: int
    """Version of the policy that generated the step's responses."""
    epoch: int
    """Pass over the prompts in which the step ended."""
    position: int
    """Prompts of that pass consumed when the step ended."""
    reward_mean: float | None
    """Mean over the rewards that are present; None when every one is missing."""
    reward_min: float | None
    """Smallest of them."""
    reward_max: float | None
    """Largest of them."""
    num_missing_rewards: int
    """Responses whose reward function failed, timed out or returned None."""
    length_mean: float
    """Mean length of the responses, tokens."""
    length_p95: float
    """95th percentile of the length of the responses, tokens."""
    length_max: int
    """Longest response, tokens."""
    prompt_tokens: int
    """Prompt tokens of the step, over all rows."""
    response_tokens: int
    """Response tokens of the step, over all rows."""
    stage_s: Mapping[str, float]
    """Duration of every stage, by name; concurrent stages overlap."""
    step_s: float
    """Duration of the whole step."""
    tokens_per_s: float
    """Prompt and response tokens of the step divided by its duration."""
    memory_bytes: Mapping[str, int]
    """Peak device memory of every worker in the step; on a CPU, of its process since it began."""
    plan: Mapping[str, str]
    """Where every model-stage ran, e.g. `tp2 pp1 dp1 on 0,1`."""
    learning_rate: float
    """The actor's learning rate in the step."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Losses, gradient norms, KL, entropy, clip fractions, by name."""
    overhead_s: float = 0.0
    """Part of the step that belongs to no stage: scheduling, tracking, records."""


FIELDS = frozenset(entry.name for entry in dataclasses.fields(StepRecord))


def _finite(value: Any) -> Any:
    """`value` with non-finite numbers as None, which JSON can hold; containers are copied."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return value


def to_json(record: StepRecord) -> str:
    """One line of strict JSON without a line break. NaN and infinities become null."""
    values = {name: _finite(getattr(record, name)) for name in record.__dataclass_fields__}
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def from_json(line: str) -> StepRecord:
    """The record of one line; a null statistic comes back as NaN.

    Raises DataError when the line is not a JSON object with exactly the fields of a record.
    """
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(explain("cannot read a step record", values=line[:80], rule=str(error))) from error
    if not isinstance(values, dict) or set(values) != FIELDS:
        found = sorted(set(values) ^ FIELDS) if isinstance(values, dict) else type(values).__name__
        raise DataError(
            explain(
                "cannot read a step record",
                values=f"unexpected or absent: {found}",
                rule="a record has exactly the fields of StepRecord",
                remedy="the file was written by another version of nereus; start the run in a new folder",
            )
        )
    stats = {name: math.nan if value is None else float(value) for name, value in values["stats"].items()}
    return StepRecord(**{**values, "stats": stats})
