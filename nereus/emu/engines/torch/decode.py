"""The decoding loop: draw a token for every running row, drop the rows that are done, go on.

Letters: b rows of the call, r running rows, t response positions.

Most rows of a step end early and a few run long, so the cache is compacted whenever a quarter of the running
rows is done: the tail costs what its own rows cost.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.emu.batch import PromptBatch, Sampling
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.sampling import num_draws, sample, uniforms

COMPACT_BELOW = 0.75  # share of running rows that are alive
GROWTH = 128  # first allocation of response slots; doubled when they are used up
_UNIFORMS = 64  # positions whose random numbers are made at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Responses [b, t] right-padded with zeros, their log-probabilities, lengths, and whether a stop ended
    them. Log-probabilities are valid on the last stage only.
    """

    tokens_bt: Tensor
    logprobs_bt: Tensor
    lens_b: Tensor
    stopped_b: Tensor


class _Transcript:
    """What was drawn so far: steps since the last compaction as they came, all before it in place."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._num_rows = num_rows
        self.rows_r = torch.arange(num_rows, device=device)

    def add(self, tokens_r: Tensor, logprobs_r: Tensor) -> None:
        """One step of the running rows."""
        self._tokens.append(tokens_r)
        self._logprobs.append(logprobs_r)

    def keep(self, alive_r: Tensor) -> None:
        """Go on with these of the running rows."""
        self._close()
        self.rows_r = self.rows_r[alive_r]

    def _close(self) -> None:
        if self._tokens:
            block = (self.rows_r, torch.stack(self._tokens, dim=1), torch.stack(self._logprobs, dim=1))
            self._blocks.append(block)
            self._tokens, self._logprobs = [], []

    def finish(self, stop_ids: Sequence[int]) -> Decoded:
        """Everything, cut after each row's first stop token."""
        self._close()
        num_steps = sum(tokens_rt.shape[1] for _, tokens_rt, _ in self._blocks)
        tokens_bt = torch.zeros(self._num_rows, num_steps, dtype=torch.long, device=self.rows_r.device)
        logprobs_bt = torch.zeros(self._num_rows, num_steps, device=self.rows_r.device)
        at = 0
        for rows_r, tokens_rt, logprobs_rt in self._blocks:
            columns = slice(at, at + tokens_rt.shape[1])
            tokens_bt[rows_r, columns], logprobs_bt[rows_r, columns] = tokens_rt, logprobs_rt
            at = columns.stop
        is_stop_bt = torch.isin(tokens_bt, torch.tensor(stop_ids, dtype=torch.long, device=tokens_bt.device))
        before_bt = is_stop_bt.cumsum(dim=1) - is_stop_bt.long()
        mask_bt = before_bt == 0
        lens_b = mask_bt.sum(dim=1)
        return Decoded(
            tokens_bt=tokens_bt * mask_bt,
            logprobs_bt=logprobs_bt * mask_bt,
            lens_b=lens_b,
            stopped_b=is_stop_bt.any(dim=1),
        )


class _Draw:
    """The rule by which tokens of the running rows are chosen, and their random numbers."""

    def __init__(
        self, prompts: PromptBatch, sampling: Sampling, vocab_size: int, device: torch.device
    ) -> None:
        self._sampling, self._device = sampling, device
        self._draws = num_draws(vocab_size)
        self._ids_r = prompts.sample_ids_b
        greedy_r = prompts.greedy_b | (sampling.temperature == 0.0)
        self._all_greedy = bool(greedy_r.all())
        self._greedy_r = greedy_r.to(device) if bool(greedy_r.any()) else None
        self._temperature = sampling.temperature or 1.0
        self._block_ndr: Tensor | None = None
        self._first = 0

    def __call__(self, logits_rv: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of the running rows at a response position."""
        return sample(
            logits_rv,
            None if self._all_greedy else self._uniforms(position),
            self._greedy_r,
            temperature=self._temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
        )

    def _uniforms(self, position: int) -> Tensor:
        block = self._block_ndr
        if block is None or position >= self._first + len(block):
            number = min(_UNIFORMS, self._sampling.max_new_tokens - position)
            block = uniforms(
                self._sampling, self._ids_r, first=position, num_positions=number, draws=self._draws
            ).to(self._device)
            self._block_ndr, self._first = block, position
        return block[position - self._first]

    def keep(self, alive_r: Tensor) -> None:
        """Go on with these of the running rows."""
        self._ids_r = self._ids_r[alive_r.cpu()]
        self._greedy_r = None if self._greedy_r is None else self._greedy_r[alive_r]
        self._block_ndr = None if self._block_ndr is None else self._block_ndr[:, :, alive_r]


def decode(
    forward: DecodeForward, prompts: PromptBatch, sampling: Sampling, device: torch.device
) -> Generator[None, None, Decoded]:
    """Answer prompts; equal on every rank of the unit but for log-probabilities.

    Collective over the unit. It pauses wherever the next stage has work, so that a stage which runs several
    of these by turns is not idle meanwhile.
    """
    draw = _Draw(prompts, sampling, forward.vocab_size, device)
    transcript = _Transcript(prompts.num_rows, device)
    width, limit = int(prompts.lens_b.max()), sampling.max_new_tokens
    alive_r = torch.ones(prompts.num_rows, dtype=torch.bool, device=device)
    is_stop_v = _stop_table(sampling.stop_token_ids, forward.vocab_size, device)
    logits_rv = forward.prompts(prompts.tokens_bs, prompts.lens_b, width + min(GROWTH, limit))
    for position in range(limit):
        yield
        if logits_rv is None:
            tokens_r = torch.empty(len(alive_r), dtype=torch.long, device=device)
            logprobs_r = torch.zeros(len(alive_r), device=device)
        else:
            tokens_r, logprobs_r = draw(logits_rv, position)
        tokens_r = forward.agree(tokens_r)
        transcript.add(tokens_r, logprobs_r)
        if position + 1 == limit:
            break
        rows_r = None
        if is_stop_v is not None:
            alive_r &= ~is_stop_v[tokens_r]
            num_alive = int(alive_r.sum())
            if num_alive == 0:
                break
            if num_alive <= COMPACT_BELOW * len(alive_r):
                rows_r = alive_r.nonzero()[:, 0]
                transcript.keep(rows_r)
                draw.keep(rows_r)
                tokens_r, alive_r = tokens_r[rows_r], alive_r[rows_r]
        _make_room(forward, rows_r, limit - position - 1)
        logits_rv = forward.step(tokens_r)
    forward.finish()
    return transcript.finish(sampling.stop_token_ids)


def by_turns(runs: Sequence[Generator[None, None, Decoded]]) -> list[Decoded]:
    """Advance all runs in turn until each has its result; results in order of the runs."""
    results: dict[int, Decoded] = {}
    while len(results) < len(runs):
        for number, run in enumerate(runs):
            if number in results:
                continue
            try:
                next(run)
            except StopIteration as end:
                results[number] = end.value
    return [results[number] for number in range(len(runs))]


def _make_room(forward: DecodeForward, rows_r: Tensor | None, left: int) -> None:
    """Compact the cache to these rows, or grow it when its slots are used up; `left` slots may be needed."""
    cache = forward.cache
    free = cache.capacity - cache.length
    if rows_r is None and free > 0:
        return
    used = cache.length
    slots = free if free > 0 else min(left, max(GROWTH, used))
    cache.keep(rows_r, cache.length + slots)


def _stop_table(stop_ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor | None:
    """Bool [v]: which tokens stop a row; None when none does."""
    known = [token for token in stop_ids if 0 <= token < vocab_size]
    if not known:
        return None
    table_v = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    table_v[known] = True
    return table_v
