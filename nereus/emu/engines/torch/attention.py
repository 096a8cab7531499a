"""Causal attention over rows that start at position 0: the `Attend` of training and scoring.

Letters: n packed tokens, b rows, s row width, q query heads, k key-value heads, d head width.

Rows are right-padded, so the causal mask alone hides the padding from every token that counts. Where rows are
packed, the score matrix of all tokens is block-diagonal, a block a row; rows of like length that follow one
another are computed together, and what is computed beside the blocks is bounded:

    rows of 9 8 8 3 2 tokens      [9 8 8] padded to 9, [3] [2] each alone      no row is padded to the longest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nereus.emu.engines.torch.rows import put_rows, take_rows

BLOCK_ABOVE = (
    0.8  # share of real tokens in rows that are computed together: one call more costs about as much
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Rows computed together: tokens `start` to `stop`, `num_rows` rows padded to `width`.

    `places_n` says where in the padded rows (b * s) each of them sits; None where no row is padded.
    """

    start: int
    stop: int
    num_rows: int
    width: int
    places_n: Tensor | None = None

    def attend(self, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side of this block's tokens, given those of all."""
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
        x_nkd = x_nkd[self.start : self.stop]
        if self.places_n is not None:
            x_nkd = put_rows(x_nkd, self.places_n, self.num_rows * self.width)
        return x_nkd.view(self.num_rows, self.width, *x_nkd.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalAttention:
    """Attention within each of `num_rows` rows of `width` tokens.

    `places_n` says where in the padded rows (b * s) each packed token sits; None when nothing is packed away.
    `blocks` are then the rows computed together, as `row_blocks` made them.
    """

    num_rows: int
    width: int
    places_n: Tensor | None = None
    blocks: tuple[RowBlock, ...] = ()

    def __call__(self, layer: int, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side, [n, q * d]; the same for every `layer`."""
        if self.places_n is None:
            whole = RowBlock(start=0, stop=len(q_nqd), num_rows=self.num_rows, width=self.width)
            return whole.attend(q_nqd, k_nkd, v_nkd)
        outs = [block.attend(q_nqd, k_nkd, v_nkd) for block in self.blocks]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def to(self, device: torch.device) -> CausalAttention:
        """The same with its indices on another device."""
        blocks = tuple(replace(block, places_n=_moved(block.places_n, device)) for block in self.blocks)
        return replace(self, places_n=_moved(self.places_n, device), blocks=blocks)


def _moved(places_n: Tensor | None, device: torch.device) -> Tensor | None:
    return None if places_n is None else places_n.to(device)


def row_blocks(lens: Sequence[int]) -> tuple[RowBlock, ...]:
    """Blocks of rows with so many packed tokens each; empty rows are in none.

    A row joins those before it where at least `BLOCK_ABOVE` of the padded block stays real, so rows in order
    of length make few blocks.
    """
    groups: list[list[int]] = []
    for num in lens:
        if not num:
            continue
        group = [*groups[-1], num] if groups else []
        if group and sum(group) >= BLOCK_ABOVE * max(group) * len(group):
            groups[-1] = group
        else:
            groups.append([num])
    blocks, start = [], 0
    for group in groups:
        stop, width = start + sum(group), max(group)
        places_n = None
        if stop - start < width * len(group):
            real_bs = torch.arange(width) < torch.tensor(group)[:, None]
            places_n = real_bs.flatten().nonzero().squeeze(1)
        blocks.append(RowBlock(start=start, stop=stop, num_rows=len(group), width=width, places_n=places_n))
        start = stop
    return tuple(blocks)
