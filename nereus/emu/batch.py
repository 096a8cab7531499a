"""The values that cross a stage's border between driver and workers: frozen dataclasses of tensors.

Letters: b rows, s tokens of prompt plus response (right-padded), t response tokens (right-padded).
Row i holds its prompt at [0, prompt_lens_b[i]) and its response right after it. Response-aligned tensors
`x_bt` speak of the token at row position `prompt_lens_b[i] + t`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of tensors and tuples that can be selected and joined; every field but `shared` ones has b
    rows.
    """

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """The rows at `index`, in that order; padding to the widest row is kept."""
        rows = torch.as_tensor(index, dtype=torch.long)
        return replace(self, **{f.name: _take(getattr(self, f.name), rows) for f in fields(self)})

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as arrays: of a tensor, torch pickles the whole storage behind a view, ten times as slowly,
        and into the message, where an array lies beside it and is not copied.
        """
        return _rebuilt, (type(self), {f.name: _carried(getattr(self, f.name)) for f in fields(self)})


RowsT = TypeVar("RowsT", bound=_Rows)


@dataclass(frozen=True, slots=True)
class _Carried:
    """A tensor on its way."""

    array: NDArray[Any]


def _carried(value: Any) -> Any:
    fits = isinstance(value, Tensor) and value.is_cpu and value.dtype != torch.bfloat16  # numpy has none
    return _Carried(value.detach().numpy()) if fits else value


def _rebuilt(kind: type[RowsT], values: dict[str, Any]) -> RowsT:
    """Rows as they were; an array that lies in shared memory is copied, for nobody may write into that."""
    return kind(**{name: _arrived(value) for name, value in values.items()})


def _arrived(value: Any) -> Any:
    if not isinstance(value, _Carried):
        return value
    return torch.from_numpy(value.array if value.array.flags.writeable else value.array.copy())


def _take(value: Any, rows: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, _Rows):
        return value.select(rows)
    if isinstance(value, tuple):
        return tuple(value[i] for i in rows.tolist())
    return value


@dataclass(frozen=True, kw_only=True)
class PromptBatch(_Rows):
    """Prompts to answer: int64 `tokens_bs` right-padded, `lens_b`, and `sample_ids_b` that key the
    randomness.

    Rows with `greedy_b` true are decoded by argmax whatever the temperature (ReMax baselines). A prompt may
    end with the first tokens of its response, which then goes on: int64 `first_b` is the number of these
    tokens, None where there are none, and `limit_b` the most tokens to draw, None where the sampling's limit
    holds for all.
    """

    tokens_bs: Tensor
    lens_b: Tensor
    sample_ids_b: Tensor
    greedy_b: Tensor
    first_b: Tensor | None = None
    limit_b: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of prompts."""
        return int(self.tokens_bs.shape[0])

    @property
    def positions_b(self) -> Tensor:
        """The position in its response of each row's next token; int64 [b]."""
        return torch.zeros_like(self.lens_b) if self.first_b is None else self.first_b

    def limits_b(self, sampling: Sampling) -> Tensor:
        """The most tokens to draw for each row; int64 [b]."""
        most = sampling.max_new_tokens
        return torch.full_like(self.lens_b, most) if self.limit_b is None else self.limit_b.clamp(max=most)


@dataclass(frozen=True, kw_only=True)
class TokenBatch(_Rows):
    """Prompts with their responses: int64 `tokens_bs` right-padded with zeros, and both lengths."""

    tokens_bs: Tensor
    prompt_lens_b: Tensor
    response_lens_b: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.tokens_bs.shape[0])

    @property
    def max_response(self) -> int:
        """Width t of response-aligned tensors: the longest response, at least 1."""
        return max(1, int(self.response_lens_b.max())) if self.num_rows else 1

    def response_mask(self) -> Tensor:
        """Bool [b, t]: true where a response token was produced."""
        return torch.arange(self.max_response) < self.response_lens_b[:, None]

    def trimmed(self) -> TokenBatch:
        """The same rows without columns that every row pads."""
        width = max(1, int((self.prompt_lens_b + self.response_lens_b).max())) if self.num_rows else 1
        return replace(self, tokens_bs=self.tokens_bs[:, :width])


@dataclass(frozen=True, kw_only=True)
class Rollouts(_Rows):
    """Responses of the policy: the token ids are the engine's own and are never re-encoded from text.

    `logprobs_bt` are the engine's log-probabilities of the tempered distribution softmax(logits /
    temperature) before top-p, zero beyond a response; scoring and training use the same temperature.
    `stopped_b` is false for a response that reached the length limit. `sample_ids_b` keys the row's
    randomness. `version` is the policy's, and the first one's where several drew the tokens one after the
    other: int64 `versions_bt` then names each token's. Bool `policy_bt` is true where the policy drew the
    token, and false at what it observed in between: the output of a tool; None where it drew all of them. At
    observed tokens log-probabilities and versions mean nothing, and `policy_mask` is what every statistic and
    loss goes by.
    """

    batch: TokenBatch
    logprobs_bt: Tensor
    stopped_b: Tensor
    sample_ids_b: Tensor
    version: int
    versions_bt: Tensor | None = None
    policy_bt: Tensor | None = None

    def policy_mask(self) -> Tensor:
        """Bool [b, t]: true at the response tokens that the policy drew. Nothing that is learnt or averaged
        reads another one (I16).
        """
        mask_bt = self.batch.response_mask()
        return mask_bt if self.policy_bt is None else mask_bt & self.policy_bt[:, : mask_bt.shape[1]]

    @property
    def policy_lens_b(self) -> Tensor:
        """How many tokens of each response the policy drew; int64 [b]."""
        return self.policy_mask().sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Scores(_Rows):
    """What a forward pass over responses gives: [b, t] float32, zero beyond a response, None if not asked."""

    logprobs_bt: Tensor | None = None
    entropy_bt: Tensor | None = None
    values_bt: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TrainBatch(_Rows):
    """Rows to learn from. `mask_bt` is float 0/1: the tokens that the policy drew and that count in the loss.

    Actor training reads `old_logprobs_bt`, `advantages_bt` and, for a KL loss, `reference_logprobs_bt`;
    critic training reads `old_values_bt` and `returns_bt`. Absent ones are None. `behaviour_logprobs_bt` are
    those of the policy that drew the tokens where `old_logprobs_bt` are another's: the proximal policy's.
    """

    batch: TokenBatch
    mask_bt: Tensor
    old_logprobs_bt: Tensor | None = None
    advantages_bt: Tensor | None = None
    reference_logprobs_bt: Tensor | None = None
    old_values_bt: Tensor | None = None
    returns_bt: Tensor | None = None
    behaviour_logprobs_bt: Tensor | None = None

    def trimmed(self) -> TrainBatch:
        """The same rows without columns that every row pads."""
        batch = self.batch.trimmed()
        width = batch.max_response
        cut = {
            f.name: value[:, :width]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, batch=batch, **cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to decode. `temperature` 0 means greedy. Tokens come from the nucleus `top_p` of the `top_k` most
    likely ones (None: of all). Randomness is counter-based by (seed, stream, step, sample id, position), so
    it does not move with the layout.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMetrics:
    """What one optimizer step reports, already reduced over the unit's ranks and all units.

    `loss` is the global loss; `stats` holds the loss's own sums and ratios by name; `gradient_norm` is the
    norm before clipping; `seconds` by phase (forward_backward, reduce, optimizer). Where the norm is not
    finite the state was not updated.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    stats: dict[str, float]
    seconds: dict[str, float]

    @property
    def updated(self) -> bool:
        """Whether the step has changed the weights."""
        return math.isfinite(self.gradient_norm)


def join_rows(parts: Sequence[RowsT], order: Sequence[int] | Tensor | None = None) -> RowsT:
    """The rows of all parts, one part after the other, tensors padded with zeros to the widest.

    With `order`, row i of the result is joined row `order[i]`. Fields that are None in one part are None
    in all; a field that is neither tensor, tuple nor rows (a version) is taken from the first part.
    """
    assert parts, "nothing to join"
    first = parts[0]
    joined = replace(
        first, **{f.name: _join([getattr(part, f.name) for part in parts]) for f in fields(first)}
    )
    return joined if order is None else joined.select(order)


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if first.dim() == 1:
            return torch.cat(values)
        width = max(value.shape[1] for value in values)
        return torch.cat([torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values])
    if isinstance(first, _Rows):
        return join_rows(values)
    if isinstance(first, tuple):
        return tuple(item for value in values for item in value)
    return first
