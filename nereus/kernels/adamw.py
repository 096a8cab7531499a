"""AdamW over flat arenas in one pass: moments, master weights, and their half-precision copy.

The Triton form is bitwise equal to the twin: the same float32 operations in the same order, with products and
sums not contracted (`enable_fp_fusion=False`) and roots and quotients rounded to nearest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nereus.kernels.dispatch import runs_triton
from nereus.kernels.language import INTERPRETED, cdiv, jit, narrow, tl

TILE = 1024


def adamw_(
    weights: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step_count: int,
) -> None:
    """Step number `step_count` (from 1) in place; flat float32 tensors of one length, `copy` of any dtype.

    w <- w (1 - lr wd); m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
    w <- w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)   (Loshchilov and Hutter 2019, algorithm 2)
    """
    beta1, beta2 = betas
    # Python's numbers are rounded to float32 once, here, so that both forms multiply by the same ones.
    keep, b1, a1, b2, a2 = (
        _f32(x) for x in (1.0 - learning_rate * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2)
    )
    rate = _f32(learning_rate / (1.0 - beta1**step_count))
    unbias = _f32((1.0 - beta2**step_count) ** -0.5)
    if runs_triton(weights):
        _adamw_kernel[(cdiv(weights.numel(), TILE),)](
            weights, grad, exp_avg, exp_avg_sq, weights if copy is None else copy, weights.numel(),
            keep, b1, a1, b2, a2, rate, unbias, _f32(eps),
            COPY=copy is not None, INTERPRETED=INTERPRETED, TILE=TILE,
            **({} if INTERPRETED else {"enable_fp_fusion": False}),
        )  # fmt: skip
        return
    weights.mul_(keep)
    exp_avg.mul_(b1).add_(grad * a1)
    exp_avg_sq.mul_(b2).add_(grad * grad * a2)
    # A root in float64, rounded once, is the nearest float32; torch's own on CPUs is not always.
    root = exp_avg_sq.double().sqrt().float()
    weights.sub_((exp_avg / (root * unbias + _f32(eps))) * rate)
    if copy is not None:
        copy.copy_(weights)


def _f32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


@jit
def _adamw_kernel(
    w_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, size, keep, b1, a1, b2, a2, rate, unbias, eps,
    COPY: tl.constexpr, INTERPRETED: tl.constexpr, TILE: tl.constexpr,
) -> Any:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    ok = at < size
    g = tl.load(g_ptr + at, mask=ok, other=0.0)
    w = tl.load(w_ptr + at, mask=ok, other=0.0) * keep
    m = tl.load(m_ptr + at, mask=ok, other=0.0) * b1 + g * a1
    v = tl.load(v_ptr + at, mask=ok, other=0.0) * b2 + g * g * a2
    denominator = tl.math.sqrt_rn(v) * unbias + eps
    w = w - tl.math.div_rn(m, denominator) * rate
    tl.store(m_ptr + at, m, mask=ok)
    tl.store(v_ptr + at, v, mask=ok)
    tl.store(w_ptr + at, w, mask=ok)
    if COPY:
        tl.store(copy_ptr + at, narrow(w, copy_ptr.dtype.element_ty, INTERPRETED), mask=ok)
