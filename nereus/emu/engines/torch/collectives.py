"""The two conjugate tensor-parallel collectives, as autograd functions on an explicit group.

    copy_to      forward: identity      backward: all-reduce     enters a column-parallel product
    reduce_from  forward: all-reduce    backward: identity       leaves a row-parallel product

Every rank of a stage runs the same sequence of them, forwards and backwards. `None` is a group of one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.engines.torch.clock import span


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The engine may hand the same tensor to another consumer, so it is not reduced in place.
        total = grad.clone(memory_format=torch.contiguous_format)
        with span("tensor_parallel"):
            dist.all_reduce(total, group=ctx.group)
        return total, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        with span("tensor_parallel"):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`x` unchanged; its gradient is summed over the group."""
    if group is None or not torch.is_grad_enabled():
        return x
    return _CopyTo.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of `x` over the group, in place: `x` must be a fresh result that nobody else reads."""
    if group is None:
        return x
    if not torch.is_grad_enabled():
        with span("tensor_parallel"):
            dist.all_reduce(x, group=group)
        return x
    return _ReduceFrom.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]
