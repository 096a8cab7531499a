"""Matrix products of the trunk: on CPUs by oneDNN where that is faster than what `F.linear` calls, MKL.

Letters: n tokens, i inputs, o outputs.

On a Zen 4 core, float32: 1024 x 576 -> 3072 takes 15.6 ms against 35.4, its two backward products 15.4 and
16.9 against 32.9 and 34.0; 8 x 576 -> 3072 with weights from memory 0.52 ms against 0.73, and 0.33 packed.
A call costs 10 us more, so small products stay with MKL. oneDNN is reached by the operator that
torch.compile's CPU back end emits, which has no derivative of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)
_WORTH_A_CALL = 1 << 20  # multiply-adds from which oneDNN's call pays
_WORTH_PACKING = 1 << 18  # weights from which packing does: smaller ones stay in the cache
_PACKED_FOR = 128  # rows; the layout for these serves fewer rows equally well


def product(x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias, [n, o]; the weight may be `packed`, which then has no gradient."""
    if weight_oi.is_mkldnn:
        return _onednn(x_ni, weight_oi, bias_o)
    if not (_AVAILABLE and x_ni.dtype == torch.float32 and x_ni.is_cpu):
        return F.linear(x_ni, weight_oi, bias_o)
    if x_ni.shape[0] * weight_oi.numel() < _WORTH_A_CALL:
        return F.linear(x_ni, weight_oi, bias_o)
    if torch.is_grad_enabled():
        return _Product.apply(x_ni, weight_oi, bias_o)  # type: ignore[no-any-return, no-untyped-call]
    return _onednn(x_ni, weight_oi, bias_o)


def packed(weight_oi: Tensor) -> Tensor:
    """A copy of the weight in oneDNN's own order where that pays, else the weight itself.

    For repeated products of few rows without gradient; a later change of the weight is not seen by it.
    """
    pays = _AVAILABLE and weight_oi.dtype == torch.float32 and weight_oi.is_cpu
    if not pays or weight_oi.numel() < _WORTH_PACKING:
        return weight_oi
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_oi.detach(), _PACKED_FOR)
    return out


def _onednn(x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_ni, weight_oi, bias_o, "none", [], "")
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_ni, weight_oi)
        return _onednn(x_ni, weight_oi, bias_o)

    @staticmethod
    def backward(ctx: Any, grad_no: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_ni, weight_oi = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _onednn(grad_no, weight_oi.t(), None) if wants_x else None,
            _onednn(grad_no.t(), x_ni.t(), None) if wants_weight else None,
            grad_no.sum(dim=0) if wants_bias else None,
        )
