"""Matrix products of the trunk: on CPUs by MKL or oneDNN, whichever is faster on the processor.

Letters: n tokens, i inputs, o outputs.

`F.linear` calls MKL, which has its fastest code for Intel's processors alone; on others oneDNN takes its
place where products are large. On a Zen 4 core, float32, 1024 x 576 -> 3072 takes oneDNN 15.6 ms against
35.4, its two backward products 15.4 and 16.9 against 32.9 and 34.0. On a core of an Intel Xeon with AMX it
takes MKL 20.5 ms against 23.7, and 19.0 and 18.9 against 22.5 and 29.0; 64 x 128 -> 256 takes 34 us against
58. The processor decides and not a measurement, so that all workers of a host compute alike.

For repeated products of few rows a weight is `packed`: into oneDNN's own order (8 x 576 -> 3072 with weights
from memory on Zen 4: 0.33 ms against 0.52), or transposed for MKL (on the Xeon 0.36 ms against 0.79).
oneDNN is reached by the operator that torch.compile's CPU back end emits, which has no derivative of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _is_onednn_faster() -> bool:
    """Whether oneDNN is there, and MKL not at home on this processor."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    there = available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    name = str(torch.cpu.get_capabilities().get("cpu_name", ""))
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return there and not (has_mkl and "Intel" in name)


USES_ONEDNN = _is_onednn_faster()
_WORTH_A_CALL = 1 << 20  # multiply-adds from which oneDNN's call pays
_WORTH_PACKING = 1 << 18  # weights from which packing does: smaller ones stay in the cache
_PACKED_FOR = 128  # rows; the layout for these serves fewer rows equally well


def product(x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias, [n, o]; the weight may be `packed`, which then has no gradient."""
    if weight_oi.is_mkldnn:
        return _onednn(x_ni, weight_oi, bias_o)
    if not (USES_ONEDNN and x_ni.dtype == torch.float32 and x_ni.is_cpu):
        return F.linear(x_ni, weight_oi, bias_o)
    if x_ni.shape[0] * weight_oi.numel() < _WORTH_A_CALL:
        return F.linear(x_ni, weight_oi, bias_o)
    if torch.is_grad_enabled():
        return _Product.apply(x_ni, weight_oi, bias_o)  # type: ignore[no-any-return, no-untyped-call]
    return _onednn(x_ni, weight_oi, bias_o)


def packed(weight_oi: Tensor) -> Tensor:
    """A copy of the weight in the order that products of few rows read fastest, where that pays, else the
    weight itself.

    For repeated products without gradient; a later change of the weight is not seen by it.
    """
    if weight_oi.dtype != torch.float32 or not weight_oi.is_cpu:
        return weight_oi
    if not USES_ONEDNN:
        return weight_oi.detach().t().contiguous().t()
    if weight_oi.numel() < _WORTH_PACKING:
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
