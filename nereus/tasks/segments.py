"""Responses that are drawn a segment of tokens at a time, so that other weights may come in between. Pure.

Letters: b rows, t response tokens, r rows whose responses are not whole.

Rows that are not whole all have the same length: the segments drawn so far. A row goes on from its own tokens
as they are, never from text, and at its own position in its sequence of random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nereus.emu.batch import PromptBatch, Rollouts, Sampling
from nereus.emu.engines.rollouts import side_by_side


@dataclass(kw_only=True)
class Growing:
    """The responses to `prompts` while they are drawn, at most `max_new_tokens` each."""

    prompts: PromptBatch
    max_new_tokens: int
    num_drawn: int = 0
    tokens_bt: Tensor = field(init=False)
    logprobs_bt: Tensor = field(init=False)
    versions_bt: Tensor = field(init=False)
    lens_b: Tensor = field(init=False)
    stopped_b: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, width = self.prompts.num_rows, self.max_new_tokens
        self.tokens_bt = torch.zeros(rows, width, dtype=torch.long)
        self.logprobs_bt = torch.zeros(rows, width)
        self.versions_bt = torch.zeros(rows, width, dtype=torch.long)
        self.lens_b = torch.zeros(rows, dtype=torch.long)
        self.stopped_b = torch.zeros(rows, dtype=torch.bool)

    @property
    def open_r(self) -> Tensor:
        """The rows whose responses are not whole; int64 [r]."""
        if self.num_drawn >= self.max_new_tokens:
            return torch.zeros(0, dtype=torch.long)
        return torch.nonzero(~self.stopped_b)[:, 0]

    def sampling(self, whole: Sampling, segment_tokens: int) -> Sampling:
        """How to draw the next segment."""
        left = self.max_new_tokens - self.num_drawn
        first = whole.first_position + self.num_drawn
        return replace(whole, max_new_tokens=min(segment_tokens, left), first_position=first)

    def to_go_on(self) -> PromptBatch:
        """The open rows as prompts: each prompt with its tokens so far."""
        rows = self.open_r
        prompts = self.prompts.select(rows)
        so_far = self._rollouts().batch.select(rows)
        return replace(
            prompts, tokens_bs=so_far.tokens_bs, lens_b=so_far.prompt_lens_b + so_far.response_lens_b
        )

    def add(self, part: Rollouts, num_tokens: int) -> None:
        """The next segment, of `num_tokens` at most, of the open rows in their order."""
        rows, width = self.open_r, part.batch.max_response
        mask_rt = part.batch.response_mask()
        places_rt = (part.batch.prompt_lens_b[:, None] + torch.arange(width)) * mask_rt
        columns = slice(self.num_drawn, self.num_drawn + width)
        self.tokens_bt[rows, columns] = part.batch.tokens_bs.gather(1, places_rt) * mask_rt
        self.logprobs_bt[rows, columns] = part.logprobs_bt[:, :width] * mask_rt
        self.versions_bt[rows, columns] = part.version * mask_rt
        self.lens_b[rows] += part.batch.response_lens_b
        self.stopped_b[rows] = part.stopped_b
        self.num_drawn += num_tokens

    def finished(self) -> Rollouts:
        """The whole responses; `version` is that of the first token of all."""
        assert len(self.open_r) == 0, "responses are whole"
        return self._rollouts()

    def _rollouts(self) -> Rollouts:
        width = max(1, int(self.lens_b.max()))
        rollouts = side_by_side(
            self.prompts,
            self.tokens_bt[:, :width],
            lens_b=self.lens_b.clone(),
            logprobs_bt=self.logprobs_bt[:, :width].clone(),
            stopped_b=self.stopped_b.clone(),
            version=int(self.versions_bt[:, 0].min()),
        )
        return replace(rollouts, versions_bt=self.versions_bt[:, :width].clone())
