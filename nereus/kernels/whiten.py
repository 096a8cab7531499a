"""Whitening over the set positions of a batch in two passes over memory.

Tolerance of the Triton form against the twin: 1e-5 absolute on whitened values; its sums run in float32 over
tiles and then over their results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nereus.kernels.dispatch import runs_triton
from nereus.kernels.language import cdiv, jit, tl

TILE = 4096
EPSILON = 1e-8  # beside the variance, as in verl's masked_whiten


def masked_whiten(x_bt: Tensor, set_bt: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over set positions with the unbiased variance, zero elsewhere.

    Fewer than two set positions give zeros.
    """
    num_set = int(set_bt.sum())
    if num_set < 2:
        return torch.zeros_like(x_bt)
    if runs_triton(x_bt):
        return _whiten_triton(x_bt, set_bt, num_set)
    mean = x_bt.masked_fill(~set_bt, 0.0).sum() / num_set
    centred_bt = (x_bt - mean).masked_fill(~set_bt, 0.0)
    variance = centred_bt.square().sum() / (num_set - 1)
    return centred_bt * torch.rsqrt(variance + EPSILON)


@jit
def _moments_kernel(x_ptr, set_ptr, shift_ptr, out_ptr, size, TILE: tl.constexpr) -> Any:
    program = tl.program_id(0)
    at = program.to(tl.int64) * TILE + tl.arange(0, TILE)
    ok = at < size
    is_set = (tl.load(set_ptr + at, mask=ok, other=0) != 0) & ok
    x = tl.where(is_set, tl.load(x_ptr + at, mask=ok, other=0.0) - tl.load(shift_ptr), 0.0)
    tl.store(out_ptr + 2 * program, tl.sum(x, axis=0))
    tl.store(out_ptr + 2 * program + 1, tl.sum(x * x, axis=0))


@jit
def _scale_kernel(x_ptr, set_ptr, mean_ptr, factor_ptr, out_ptr, size, TILE: tl.constexpr) -> Any:
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    ok = at < size
    is_set = (tl.load(set_ptr + at, mask=ok, other=0) != 0) & ok
    x = (tl.load(x_ptr + at, mask=ok, other=0.0) - tl.load(mean_ptr)) * tl.load(factor_ptr)
    tl.store(out_ptr + at, tl.where(is_set, x, 0.0), mask=ok)


def _whiten_triton(x_bt: Tensor, set_bt: Tensor, num_set: int) -> Tensor:
    x, is_set = x_bt.contiguous(), set_bt.to(torch.uint8).contiguous()
    out_bt = torch.empty_like(x)
    programs = cdiv(x.numel(), TILE)
    # Sums around a value of the batch keep the variance exact where the mean is large.
    shift = x.masked_select(set_bt)[:1].float()
    sums = torch.empty(programs, 2, dtype=torch.float32, device=x.device)
    _moments_kernel[(programs,)](x, is_set, shift, sums, x.numel(), TILE=TILE)
    total, squares = sums.double().sum(dim=0).unbind()
    offset = total / num_set
    variance = (squares - num_set * offset.square()) / (num_set - 1)
    mean = (shift.double() + offset).float()
    factor = torch.rsqrt(variance + EPSILON).float().reshape(1)
    _scale_kernel[(programs,)](x, is_set, mean, factor, out_bt, x.numel(), TILE=TILE)
    return out_bt
