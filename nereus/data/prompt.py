"""One prompt as the campaign uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""What the data says beside the prompt: values that JSON can carry to a reward process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of one pass over the data.

    `sample_id` is epoch * size + index: unique over the whole run, so it keys the randomness of sampling.
    `token_ids` is what the policy reads. `text` is the prompt as text (a chat's turns rendered by the
    template). `ground_truth` and `extra` are whatever the data said, as JSON values, for the reward.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    text: str
    ground_truth: Json = None
    extra: Mapping[str, Json] = field(default_factory=dict)
