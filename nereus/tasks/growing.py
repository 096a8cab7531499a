"""Responses that are drawn piece by piece: segments of tokens, and turns with what tools say between. Pure.

Letters: b rows, t response tokens, r rows chosen, k tokens of a piece.

    prompt │ drawn by the policy │ observed │ drawn │ drawn by the next policy │ ...
           └ policy_bt   1 1 1 1   0 0 0 0 0   1 1 1   1 1 1 1

A row goes on from its own tokens as they are, never from text, and at its own position in its sequence of
random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nereus.emu.batch import PromptBatch, Rollouts
from nereus.emu.engines.rollouts import side_by_side


@dataclass(kw_only=True)
class Growing:
    """The responses to `prompts` while they are drawn, at most `max_new_tokens` each, observed ones among
    them.
    """

    prompts: PromptBatch
    max_new_tokens: int
    tokens_bt: Tensor = field(init=False)
    logprobs_bt: Tensor = field(init=False)
    versions_bt: Tensor = field(init=False)
    policy_bt: Tensor = field(init=False)
    lens_b: Tensor = field(init=False)
    stopped_b: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, width = self.prompts.num_rows, self.max_new_tokens
        self.tokens_bt = torch.zeros(rows, width, dtype=torch.long)
        self.logprobs_bt = torch.zeros(rows, width)
        self.versions_bt = torch.zeros(rows, width, dtype=torch.long)
        self.policy_bt = torch.zeros(rows, width, dtype=torch.bool)
        self.lens_b = torch.zeros(rows, dtype=torch.long)
        self.stopped_b = torch.zeros(rows, dtype=torch.bool)

    @property
    def open_r(self) -> Tensor:
        """The rows whose responses neither stopped nor reached the limit; int64 [r]."""
        return torch.nonzero(~self.stopped_b & (self.lens_b < self.max_new_tokens))[:, 0]

    def room(self, row: int) -> int:
        """Tokens that a row's response may still take."""
        return self.max_new_tokens - int(self.lens_b[row])

    def to_go_on(self, rows: Tensor | Sequence[int], *, most: int | None = None) -> PromptBatch:
        """These rows as prompts: each prompt with its tokens so far, to draw `most` more, None: to the
        limit.
        """
        rows = torch.as_tensor(rows, dtype=torch.long)
        so_far = self._rollouts(rows).batch
        left_r = self.max_new_tokens - self.lens_b[rows]
        return replace(
            self.prompts.select(rows),
            tokens_bs=so_far.tokens_bs,
            lens_b=so_far.prompt_lens_b + so_far.response_lens_b,
            first_b=self.lens_b[rows],
            limit_b=left_r if most is None else left_r.clamp(max=most),
        )

    def add(self, rows: Tensor | Sequence[int], part: Rollouts) -> None:
        """What was drawn next of these rows, in their order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        mask_rk = part.batch.response_mask()
        own_rk = torch.arange(mask_rk.shape[1]).expand(mask_rk.shape)
        at = (rows[:, None].expand(mask_rk.shape)[mask_rk], (self.lens_b[rows][:, None] + own_rk)[mask_rk])
        places_rk = (part.batch.prompt_lens_b[:, None] + own_rk) * mask_rk
        self.tokens_bt[at] = part.batch.tokens_bs.gather(1, places_rk)[mask_rk]
        self.logprobs_bt[at] = part.logprobs_bt[:, : mask_rk.shape[1]][mask_rk]
        self.versions_bt[at] = part.version
        self.policy_bt[at] = True
        self.lens_b[rows] += part.batch.response_lens_b
        self.stopped_b[rows] = part.stopped_b

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Put observed tokens after a response that stopped, and let it go on."""
        assert len(token_ids) < self.room(row), "after an observation comes at least one token"
        first, last = int(self.lens_b[row]), int(self.lens_b[row]) + len(token_ids)
        self.tokens_bt[row, first:last] = torch.tensor(token_ids, dtype=torch.long)
        self.lens_b[row] = last
        self.stopped_b[row] = False

    def response(self, row: int) -> tuple[list[int], list[bool]]:
        """A row's tokens so far, and which of them the policy drew."""
        length = int(self.lens_b[row])
        return self.tokens_bt[row, :length].tolist(), self.policy_bt[row, :length].tolist()

    def finished(self) -> Rollouts:
        """The whole responses; `version` is that of the first token of all."""
        assert len(self.open_r) == 0, "responses are whole"
        return self._rollouts(torch.arange(self.prompts.num_rows))

    def _rollouts(self, rows: Tensor) -> Rollouts:
        lens_r = self.lens_b[rows]
        width = max(1, *lens_r.tolist()) if len(rows) else 1
        versions_rt, policy_rt = self.versions_bt[rows, :width], self.policy_bt[rows, :width]
        rollouts = side_by_side(
            self.prompts.select(rows),
            self.tokens_bt[rows, :width],
            lens_b=lens_r,
            logprobs_bt=self.logprobs_bt[rows, :width],
            stopped_b=self.stopped_b[rows],
            version=int(versions_rt[:, 0].min()) if len(rows) else 0,
        )
        return replace(rollouts, versions_bt=versions_rt, policy_bt=policy_rt)
