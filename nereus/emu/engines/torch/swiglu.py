"""The gated activation silu(gate) * up on a fused product (Shazeer 2020, eq. 6), saving only its input.

Letters: n tokens, i this rank's share of the intermediate width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _forward(gate_up_n2i: Tensor) -> Tensor:
    gate, up = gate_up_n2i.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_n2i: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_n2i)
        return _forward(gate_up_n2i)

    @staticmethod
    def backward(ctx: Any, grad_ni: Tensor) -> Tensor:
        (gate_up_n2i,) = ctx.saved_tensors
        gate, up = gate_up_n2i.chunk(2, dim=-1)
        grad_n2i = torch.empty_like(gate_up_n2i)
        grad_gate, grad_up = grad_n2i.chunk(2, dim=-1)
        torch.mul(grad_ni, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_ni * up, gate, grad_input=grad_gate)
        return grad_n2i


def swiglu(gate_up_n2i: Tensor) -> Tensor:
    """silu of the first half times the second half: [n, 2i] to [n, i]."""
    if not torch.is_grad_enabled():
        return _forward(gate_up_n2i)
    return _SwiGlu.apply(gate_up_n2i)  # type: ignore[no-any-return, no-untyped-call]
