"""Keys and values of the rows being decoded: one allocation each, a slot a step, compacted by copying.

Letters: l layers, b rows, k key-value heads of this rank, c slots, d head width.

Rows are aligned at their newest token, so that a step writes one slot for all rows:

    slot   0 1 2 3 4 5
    row 0  . . p p r r      pads_b = 2
    row 1  p p p p r r      pads_b = 0

So another row can take the place of one that is done at any step: its prompt goes right before the next slot,
and what the old row left before it is hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """`keys_lbkcd` and `values_lbkcd`; slots from `length` on are free, and pad slots hold finite numbers.

    `mask` is what attention adds to the scores of all slots, [b, 1, 1, c]; None when no row is padded.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv: int,
        head_dim: int,
        pads_b: Tensor,
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_layers, len(pads_b), num_kv, capacity, head_dim)
        self.keys_lbkcd = torch.empty(shape, dtype=dtype, device=pads_b.device)
        self.values_lbkcd = torch.empty_like(self.keys_lbkcd)
        self.length = 0
        self._set_pads(pads_b)

    @property
    def capacity(self) -> int:
        """Slots that are allocated."""
        return self.keys_lbkcd.shape[3]

    @property
    def positions(self) -> Tensor:
        """The position of each row's next token: [b], or [1] where it is the same for all."""
        return self.length - self.pads_b if self.mask is not None else self.pads_b[:1] + self.length

    def keep(self, rows_b: Tensor | None, capacity: int, *, lead: int | None = None) -> None:
        """Keep these rows only (None for all) in `capacity` slots.

        The first `lead` slots go, by default those that all of them pad. A negative `lead` adds pads, so that
        a prompt longer than all rows has room.
        """
        pads_b = self.pads_b if rows_b is None else self.pads_b[rows_b]
        lead = int(pads_b.min()) if lead is None else lead
        self.keys_lbkcd = self._moved(self.keys_lbkcd, rows_b, lead, capacity)
        self.values_lbkcd = self._moved(self.values_lbkcd, rows_b, lead, capacity)
        self.length -= lead
        self._set_pads((pads_b - lead).clamp(min=0))  # rows that are done may be longer than what is kept

    def replace(self, rows_n: Tensor, lens_n: Tensor) -> None:
        """Let these rows be other ones, whose `lens_n` tokens end at the newest slot."""
        pads_b = self.pads_b.clone()
        pads_b[rows_n] = self.length - lens_n
        self._set_pads(pads_b)

    def _moved(self, old: Tensor, rows_b: Tensor | None, lead: int, capacity: int) -> Tensor:
        num_layers, num_rows, num_kv, _, head_dim = old.shape
        kept = num_rows if rows_b is None else len(rows_b)
        new = old.new_empty(num_layers, kept, num_kv, capacity, head_dim)
        first = max(0, -lead)
        new[:, :, :, :first] = 0.0
        for layer in range(num_layers):  # layer by layer, so that the copy needs no third buffer
            part = old[layer, :, :, max(0, lead) : self.length]
            new[layer, :, :, first : self.length - lead] = (
                part if rows_b is None else part.index_select(0, rows_b)
            )
        return new

    def _set_pads(self, pads_b: Tensor) -> None:
        self.pads_b = pads_b
        self.mask: Tensor | None = None
        if bool(pads_b.any()):
            hidden_bc = torch.arange(self.capacity, device=pads_b.device) < pads_b[:, None]
            zeros_bc = torch.zeros(hidden_bc.shape, dtype=self.keys_lbkcd.dtype, device=pads_b.device)
            self.mask = zeros_bc.masked_fill_(hidden_bc, float("-inf"))[:, None, None]
