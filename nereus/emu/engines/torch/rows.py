"""Moving distinct rows of a matrix to and from chosen places; the backward passes copy instead of adding.

The index holds each row at most once, so the transpose of a gather is a copy; torch's own backward, which may
not assume that, adds row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _spread(x: Tensor, index_n: Tensor, num_rows: int) -> Tensor:
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, index_n, x)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_n: Tensor) -> Tensor:
        ctx.save_for_backward(index_n)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, index_n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _spread(grad, ctx.saved_tensors[0], ctx.num_rows), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index_n: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index_n)
        return _spread(x, index_n, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def take_rows(x: Tensor, index_n: Tensor) -> Tensor:
    """Rows `index_n` (distinct) of `x` along dim 0."""
    if not torch.is_grad_enabled():
        return x.index_select(0, index_n)
    return _Take.apply(x, index_n)  # type: ignore[no-any-return, no-untyped-call]


def put_rows(x: Tensor, index_n: Tensor, num_rows: int) -> Tensor:
    """`num_rows` rows of zeros with row i of `x` at the distinct places `index_n[i]`."""
    if not torch.is_grad_enabled():
        return _spread(x, index_n, num_rows)
    return _Put.apply(x, index_n, num_rows)  # type: ignore[no-any-return, no-untyped-call]
