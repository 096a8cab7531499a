"""Rotary position embedding in the half-split form of Hugging Face checkpoints: default, linear and llama3.

Letters: n tokens, k heads, d head width, p positions.
Source: Su et al. 2021, eq. 34; the llama3 rescaling is that of the Llama 3.1 release.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nereus.emu.decoder import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position for each of the d/2 pairs; float32 [d/2]."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # Long wavelengths are stretched by `factor`, short ones kept, those between blended.
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_positions / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(
        turns < rope.low_freq_factor,
        plain / rope.factor,
        torch.where(turns > rope.high_freq_factor, plain, blended),
    )


class RopeTable:
    """Cosines and sines by position, kept for the positions seen so far and grown by doubling."""

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self.dtype, self.device = dtype, device
        self._cos_pd, self._sin_pd = self._make(256)

    def _make(self, num_positions: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(num_positions).float()[:, None] * self._frequencies
        return angles.cos().to(self.device, self.dtype), angles.sin().to(self.device, self.dtype)

    def at(self, positions_n: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, 1, d/2] at int64 `positions_n`, all below `num_positions`."""
        if num_positions > self._cos_pd.shape[0]:
            self._cos_pd, self._sin_pd = self._make(1 << (num_positions - 1).bit_length())
        return self._cos_pd[positions_n].unsqueeze(1), self._sin_pd[positions_n].unsqueeze(1)


def _turn(x_nkd: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    left, right = x_nkd.chunk(2, dim=-1)
    out_nkd = torch.empty(x_nkd.shape, dtype=x_nkd.dtype, device=x_nkd.device)
    out_left, out_right = out_nkd.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin, value=sign)
    return out_nkd


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nkd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_nkd, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_nkd: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad_nkd, cos, sin, -1.0), None, None  # the transpose of a rotation turns back


def rotate(x_nkd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its angle; `cos` and `sin` are [n, 1, d/2]."""
    if not torch.is_grad_enabled():
        return _turn(x_nkd, cos, sin, 1.0)
    return _Rotate.apply(x_nkd, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
