"""One micro-batch as whole rows side by side, for engines whose attention knows no packing.

Letters: b rows, s row width, m tokens whose hidden state is used.

Megatron's local attention and the decoders that DeepSpeed runs read rows with their padding. It is on the
right, and the causal mask hides it from every token that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.emu.engines.torch.packing import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens and positions [b, s], and the flat places [m] of the tokens whose hidden state is used."""

    tokens_bs: Tensor
    positions_bs: Tensor
    select_m: Tensor

    @classmethod
    def of(cls, packed: Packed) -> Rows:
        """The rows of a micro-batch, padding put back."""
        rows = packed.causal
        num_rows, width, places_n = rows.num_rows, rows.width, rows.places_n
        tokens_n, select_m = packed.tokens_n, packed.select_m
        if places_n is not None:
            padded = tokens_n.new_zeros(num_rows * width)
            tokens_n, select_m = padded.index_copy_(0, places_n, tokens_n), places_n[select_m]
        positions_s = torch.arange(width, device=tokens_n.device)
        return cls(
            tokens_bs=tokens_n.view(num_rows, width),
            positions_bs=positions_s.expand(num_rows, width),
            select_m=select_m,
        )
