"""The rule by which the tokens of running rows are chosen, and their random numbers.

Letters: r slots, n slots chosen, d draws a token, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.emu.batch import PromptBatch, Sampling
from nereus.emu.engines.torch.sampling import num_draws, sample, uniforms_at

_UNIFORMS = 64  # positions whose random numbers are made at once


class Draw:
    """Chooses tokens for rows that each are at a position of their own.

    A row's numbers are keyed by its sample id and its own position: neither the slot nor the step counts.
    """

    def __init__(self, sampling: Sampling, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._sampling, self._device = sampling, device
        self._draws = num_draws(vocab_size)
        self._ids_r = torch.zeros(num_slots, dtype=torch.long)
        self._firsts_r = torch.zeros(num_slots, dtype=torch.long)
        self._greedy_r = torch.ones(num_slots, dtype=torch.bool)
        self._mixed_r: Tensor | None = None  # on the device, where some rows are greedy and others are not
        self._block_dur: Tensor | None = None
        self._at = 0  # the block's number that comes next

    def put(self, slots_n: Tensor, prompts: PromptBatch) -> None:
        """Other rows in these slots: `first` draws their first tokens, `next` goes on from there."""
        self._ids_r[slots_n], self._firsts_r[slots_n] = prompts.sample_ids_b, prompts.positions_b
        self._greedy_r[slots_n] = prompts.greedy_b | (self._sampling.temperature == 0.0)
        self._set_mixed()
        if self._block_dur is not None:
            left = self._block_dur.shape[1] - self._at
            if left:
                fresh_dun = self._numbers(self._ids_r[slots_n], prompts.positions_b + 1, left)
                self._block_dur[:, self._at :, slots_n.to(self._device)] = fresh_dun

    def keep(self, slots_r: Tensor) -> None:
        """Go on with these slots."""
        self._ids_r, self._greedy_r = self._ids_r[slots_r], self._greedy_r[slots_r]
        self._firsts_r = self._firsts_r[slots_r]
        self._set_mixed()
        if self._block_dur is not None:
            self._block_dur = self._block_dur[:, :, slots_r.to(self._device)]

    def first(self, logits_nv: Tensor, slots_n: Tensor) -> tuple[Tensor, Tensor]:
        """First tokens and their log-probabilities of the rows that `put` named last."""
        greedy_n, uniforms_dn = self._greedy_r[slots_n], None
        if not bool(greedy_n.all()):
            uniforms_dn = self._numbers(self._ids_r[slots_n], self._firsts_r[slots_n], 1)[:, 0]
        mixed_n = greedy_n.to(self._device) if bool(greedy_n.any()) else None
        return self._sample(logits_nv, uniforms_dn, mixed_n)

    def next(self, logits_rv: Tensor, drawn_r: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of all slots that have drawn so many, one more than before."""
        if bool(self._greedy_r.all()):
            return self._sample(logits_rv, None, None)
        block = self._block_dur
        if block is None or self._at == block.shape[1]:
            num = min(_UNIFORMS, self._sampling.max_new_tokens)
            block = self._numbers(self._ids_r, self._firsts_r + drawn_r, num)
            self._block_dur, self._at = block, 0
        self._at += 1
        return self._sample(logits_rv, block[:, self._at - 1], self._mixed_r)

    def _numbers(self, ids_r: Tensor, positions_r: Tensor, num: int) -> Tensor:
        positions_ur = positions_r + torch.arange(num)[:, None]
        return uniforms_at(self._sampling, ids_r, positions_ur, draws=self._draws).to(self._device)

    def _sample(
        self, logits_rv: Tensor, uniforms_dr: Tensor | None, greedy_r: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return sample(
            logits_rv,
            uniforms_dr,
            greedy_r,
            temperature=self._sampling.temperature or 1.0,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
        )

    def _set_mixed(self) -> None:
        greedy_r = self._greedy_r
        mixed = bool(greedy_r.any()) and not bool(greedy_r.all())
        self._mixed_r = greedy_r.to(self._device) if mixed else None
