"""Tokens of vLLM's engine chosen as every engine of Nereus chooses them: one rule, keyed by sample.

vLLM draws from a generator for each request and reports log-probabilities of the raw or of the cut
distribution; a trainer needs those of softmax(logits / temperature), and the same sample wherever a row runs.
So the rule of `torch.sampling` is run as a logits processor: it chooses, notes the log-probability, and
leaves a single possible token to vLLM's own sampler, which works greedily.

Letters: r running rows, v vocabulary, b rows of the call, t response positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from nereus.emu.batch import PromptBatch, Sampling
from nereus.emu.engines.torch.sampling import num_draws, sample, uniforms_at

ROW = "nereus_row"  # the key under which a request carries the number of its row


class Choice:
    """The rule and the record of one call of `generate`."""

    def __init__(self, prompts: PromptBatch, sampling: Sampling, vocab_size: int) -> None:
        self._prompts, self._sampling = prompts, sampling
        self._greedy_b = prompts.greedy_b | (sampling.temperature == 0.0)
        self._draws = num_draws(vocab_size)
        self._notes: list[tuple[Sequence[int], Sequence[int], Tensor]] = []

    def choose(self, logits_rv: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Tokens int64 [r] for these rows at these positions of their responses; overwrites the logits."""
        index_r = torch.tensor(rows)
        greedy_r = self._greedy_b[index_r]
        uniforms_dr = None
        if not bool(greedy_r.all()):
            uniforms_dr = uniforms_at(
                self._sampling,
                self._prompts.sample_ids_b[index_r],
                self._prompts.positions_b[index_r] + torch.tensor(positions),
                draws=self._draws,
            ).to(logits_rv.device)
        tokens_r, logprobs_r = sample(
            logits_rv,
            uniforms_dr,
            greedy_r.to(logits_rv.device) if bool(greedy_r.any()) else None,
            temperature=self._sampling.temperature or 1.0,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
        )
        self._notes.append((rows, positions, logprobs_r))
        return tokens_r

    def logprobs(self, lens_b: Tensor) -> Tensor:
        """Float32 [b, t] of what was chosen, zero beyond these lengths: t is the longest.

        A position that was computed again, after a prompt in chunks or a sequence that had to make room, has
        the last value; what was chosen past a response's end is left out.
        """
        num_tokens = int(lens_b.max()) if len(lens_b) else 0
        out_bt = torch.zeros(self._prompts.num_rows, num_tokens)
        for rows, positions, logprobs_r in self._notes:
            rows_r, positions_r = torch.tensor(rows), torch.tensor(positions)
            inside_r = positions_r < lens_b[rows_r]
            out_bt[rows_r[inside_r], positions_r[inside_r]] = logprobs_r.cpu()[inside_r]
        return out_bt


class Chooser(LogitsProcessor):  # type: ignore[misc]  # vLLM is absent where types are checked
    """vLLM's hook: knows which row of the call sits where in the running batch, and asks the call's `Choice`.

    vLLM makes it with its engine; `choice` is set by the engine that owns it before each call.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.choice: Choice | None = None
        self._running: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        running = self._running
        for index in batch_update.removed:
            running.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            running[index] = (row_of(params), output_ids)
        for a, b, direction in batch_update.moved:
            moved, other = running.pop(a, None), running.pop(b, None)
            if moved is not None:
                running[b] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                running[a] = other

    def apply(self, logits: Tensor) -> Tensor:
        assert self.choice is not None, "a call of generate sets its choice"
        running = [self._running[index] for index in range(len(logits))]
        tokens_r = self.choice.choose(
            logits, [row for row, _ in running], [len(output_ids) for _, output_ids in running]
        )
        return logits.fill_(-torch.inf).scatter_(1, tokens_r[:, None], 0.0)


def row_of(params: SamplingParams) -> int:
    """The row of the call that a request answers."""
    assert params.extra_args is not None, "every request carries its row"
    return int(params.extra_args[ROW])
