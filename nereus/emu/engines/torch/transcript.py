"""What was drawn for the rows in the slots of a cache, until they are whole.

Letters: r slots, n slots chosen, t response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Whole responses [n, t], right-padded with zeros, of the rows numbered `rows_n` in the order in which
    they came; their log-probabilities, lengths, and whether a stop token ended them. Log-probabilities are
    valid on the last stage only.
    """

    rows_n: Tensor
    tokens_nt: Tensor
    logprobs_nt: Tensor
    lens_n: Tensor
    stopped_n: Tensor


class Transcript:
    """Tokens and log-probabilities by slot: the newest steps as they came, all before them in place.

    `rows_r` is the row in each slot and `drawn_r` the number of its tokens; a slot goes on counting when its
    row is done, and what it draws then is dropped.
    """

    def __init__(self, num_slots: int, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._tokens_rt = torch.zeros(num_slots, 0, dtype=torch.long, device=device)
        self._logprobs_rt = torch.zeros(num_slots, 0, device=device)
        self.rows_r = torch.full((num_slots,), -1)
        self.drawn_r = torch.zeros(num_slots, dtype=torch.long)

    def put(self, slots_n: Tensor, rows_n: Tensor, tokens_n: Tensor, logprobs_n: Tensor) -> None:
        """Other rows in these slots, with their first tokens."""
        self._close()
        self.rows_r[slots_n], self.drawn_r[slots_n] = rows_n, 1
        self._widen(1)
        at_n = slots_n.to(self._tokens_rt.device)
        self._tokens_rt[at_n, 0], self._logprobs_rt[at_n, 0] = tokens_n, logprobs_n

    def add(self, tokens_r: Tensor, logprobs_r: Tensor) -> None:
        """One step of all slots."""
        self._steps.append((tokens_r, logprobs_r))
        self.drawn_r += 1

    def keep(self, slots_r: Tensor) -> None:
        """Go on with these slots."""
        self._close()
        at_r = slots_r.to(self._tokens_rt.device)
        self._tokens_rt, self._logprobs_rt = self._tokens_rt[at_r], self._logprobs_rt[at_r]
        self.rows_r, self.drawn_r = self.rows_r[slots_r], self.drawn_r[slots_r]

    def take(self, slots_n: Tensor, limits_n: Tensor, stop_ids: Sequence[int]) -> Finished:
        """The responses in these slots, cut after each one's first stop token or at its limit. The slots hold
        no row from then on.
        """
        self._close()
        device = self._tokens_rt.device
        tokens_nt = self._tokens_rt[slots_n.to(device), : self._limit]
        is_stop_nt = torch.isin(tokens_nt, torch.tensor(stop_ids, dtype=torch.long, device=device))
        before_nt = is_stop_nt.cumsum(dim=1) - is_stop_nt.long()
        within_nt = torch.arange(tokens_nt.shape[1], device=device) < limits_n.to(device)[:, None]
        mask_nt = (before_nt == 0) & within_nt
        lens_n = mask_nt.sum(dim=1)
        width = int(lens_n.max())
        mask_nt = mask_nt[:, :width]
        rows_n = self.rows_r[slots_n]
        self.rows_r[slots_n] = -1
        return Finished(
            rows_n=rows_n,
            tokens_nt=tokens_nt[:, :width] * mask_nt,
            logprobs_nt=self._logprobs_rt[slots_n.to(device), :width] * mask_nt,
            lens_n=lens_n,
            stopped_n=(is_stop_nt & within_nt).any(dim=1),
        )

    def _close(self) -> None:
        """Put the newest steps in their places: what a row draws past the limit into the column after it."""
        if not self._steps:
            return
        num = len(self._steps)
        columns_rt = (self.drawn_r - num)[:, None] + torch.arange(num)
        self._widen(min(int(columns_rt.max()), self._limit) + 1)
        columns_rt = columns_rt.clamp(max=self._limit).to(self._tokens_rt.device)
        self._tokens_rt.scatter_(1, columns_rt, torch.stack([step[0] for step in self._steps], dim=1))
        self._logprobs_rt.scatter_(1, columns_rt, torch.stack([step[1] for step in self._steps], dim=1))
        self._steps = []

    def _widen(self, width: int) -> None:
        missing = width - self._tokens_rt.shape[1]
        if missing > 0:
            extra = max(missing, min(self._tokens_rt.shape[1], self._limit + 1 - self._tokens_rt.shape[1]))
            self._tokens_rt = torch.nn.functional.pad(self._tokens_rt, (0, extra))
            self._logprobs_rt = torch.nn.functional.pad(self._logprobs_rt, (0, extra))
