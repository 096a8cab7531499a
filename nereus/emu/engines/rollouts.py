"""From what an engine decoded to rollouts: prompts and responses side by side. The same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nereus.emu.batch import PromptBatch, Rollouts, TokenBatch
from nereus.errors import DataError, explain


def check_prompts(prompts: PromptBatch) -> None:
    """Raise DataError for an empty prompt."""
    if bool((prompts.lens_b < 1).any()):
        raise DataError(
            explain(
                "cannot generate",
                values=f"prompt lengths {prompts.lens_b.tolist()}",
                rule="a prompt has at least one token",
                remedy="begin prompts with the tokenizer's bos token",
            )
        )


def side_by_side(
    prompts: PromptBatch,
    tokens_bt: Tensor,
    *,
    lens_b: Tensor,
    logprobs_bt: Tensor,
    stopped_b: Tensor,
    version: int,
) -> Rollouts:
    """Rollouts of right-padded responses [b, t] of these lengths; all tensors lie on the CPU."""
    batch = TokenBatch(
        tokens_bs=_joined(prompts, tokens_bt, lens_b),
        prompt_lens_b=prompts.lens_b,
        response_lens_b=lens_b,
    )
    return Rollouts(
        batch=batch,
        logprobs_bt=_widened(logprobs_bt, batch.max_response),
        stopped_b=stopped_b,
        sample_ids_b=prompts.sample_ids_b,
        version=version,
    )


def padded(responses: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Responses of any lengths as int64 [b, t], right-padded with zeros, and their lengths."""
    lens_b = torch.tensor([len(response) for response in responses], dtype=torch.long)
    width = int(lens_b.max()) if len(responses) else 0
    tokens_bt = torch.zeros(len(responses), width, dtype=torch.long)
    for row, response in zip(tokens_bt, responses, strict=True):
        row[: len(response)] = torch.tensor(response, dtype=torch.long)
    return tokens_bt, lens_b


def _joined(prompts: PromptBatch, tokens_bt: Tensor, response_lens_b: Tensor) -> Tensor:
    """Int64 [b, s]: each response right after its prompt, zeros after it."""
    num_rows, lens_b = prompts.num_rows, prompts.lens_b
    width = int((lens_b + response_lens_b).max()) if num_rows else 1
    tokens_bs = torch.zeros(num_rows, width, dtype=torch.long)
    places_s = torch.arange(width)
    is_prompt_bs = places_s < lens_b[:, None]
    num_columns = min(width, prompts.tokens_bs.shape[1])
    tokens_bs[:, :num_columns] = prompts.tokens_bs[:, :num_columns] * is_prompt_bs[:, :num_columns]
    is_response_bs = ~is_prompt_bs & (places_s < (lens_b + response_lens_b)[:, None])
    tokens_bs[is_response_bs] = tokens_bt[torch.arange(tokens_bt.shape[1]) < response_lens_b[:, None]]
    return tokens_bs


def _widened(logprobs_bt: Tensor, width: int) -> Tensor:
    """The first `width` columns, or zeros where there are none."""
    return torch.nn.functional.pad(logprobs_bt, (0, max(0, width - logprobs_bt.shape[1])))[:, :width]
