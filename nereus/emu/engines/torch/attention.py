"""Causal attention over rows that start at position 0: the `Attend` of training and scoring.

Letters: n packed tokens, b rows, s row width, q query heads, k key-value heads, d head width.

Rows are right-padded, so the causal mask alone hides the padding from every token that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nereus.emu.engines.torch.rows import put_rows, take_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalAttention:
    """Attention within each of `num_rows` rows of `width` tokens.

    `places_n` says where in the padded rows (b * s) each packed token sits; None when nothing is packed away.
    """

    num_rows: int
    width: int
    places_n: Tensor | None = None

    def __call__(self, layer: int, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side, [n, q * d]; the same for every `layer`."""
        out_bqsd = F.scaled_dot_product_attention(
            self._rows(q_nqd),
            self._rows(k_nkd),
            self._rows(v_nkd),
            is_causal=True,
            enable_gqa=q_nqd.shape[1] != k_nkd.shape[1],
        )
        out_n = out_bqsd.transpose(1, 2).reshape(self.num_rows * self.width, -1)
        return out_n if self.places_n is None else take_rows(out_n, self.places_n)

    def _rows(self, x_nkd: Tensor) -> Tensor:
        if self.places_n is not None:
            x_nkd = put_rows(x_nkd, self.places_n, self.num_rows * self.width)
        return x_nkd.view(self.num_rows, self.width, *x_nkd.shape[1:]).transpose(1, 2)
