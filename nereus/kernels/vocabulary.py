"""Output head and softmax fused: what one part of the vocabulary adds to log-probability and entropy.

Letters: m tokens, h hidden, v this part's rows of the vocabulary, s slices of it.

With logits z = x W^T / temperature and l = z - lse, the log-softmax within the part, a token has four
numbers:

    lse      hit = l[target], or 0      has = 1 where the target is in the part      mean = sum exp(l) l

Numbers of several parts join exactly (`join`), whether the parts are slices of one rank's vocabulary or lie
on several ranks. So the Triton form cuts the vocabulary into slices that run side by side, walks each slice
in tiles with a running maximum (Milakov and Gimelshein 2018), and no logit ever leaves the chip.

Tolerance of the Triton form against the twin: 5e-5 plus 1e-5 of the value: both sum exact products of the
inputs in float32, in another order. Gradients by logits: 1e-6 over the temperature plus 1e-5 of the value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nereus.kernels.dispatch import runs_triton
from nereus.kernels.language import INTERPRETED, cdiv, jit, tl

ROWS, COLUMNS, DEPTH = 64, 128, 64  # a tile: tokens, vocabulary, hidden
PROGRAMS = 264  # two a multiprocessor of an H100 or H200: as many slices as fill them
LEAST = -3.0e38  # stands for log 0, and stays finite times 0


def part_numbers(
    x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, *, start: int, temperature: float, entropy: bool
) -> Tensor:
    """The four numbers of every token for the rows of the vocabulary from token id `start` on; float32 [m,
    4].

    An empty part gives the least lse and zeros. `mean` is 0 unless `entropy` is asked for.
    """
    if runs_triton(x_mh):
        return _part_numbers_triton(x_mh, weight_vh, targets_m, start, temperature, entropy)
    return part_numbers_twin(
        x_mh, weight_vh, targets_m, start=start, temperature=temperature, entropy=entropy
    )


def part_numbers_twin(
    x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, *, start: int, temperature: float, entropy: bool
) -> Tensor:
    """The definition, in plain torch; makes all logits. Products are summed in float32 and not rounded."""
    out_m4 = torch.zeros(len(x_mh), 4, dtype=torch.float32, device=x_mh.device)
    if not len(weight_vh):
        out_m4[:, 0] = LEAST
        return out_m4
    z_mv = x_mh.float() @ weight_vh.float().t() / temperature
    lse_m = z_mv.logsumexp(dim=1)
    l_mv = z_mv - lse_m[:, None]
    columns_m, inside_m = local_columns(targets_m, start, len(weight_vh))
    out_m4[:, 0] = lse_m
    out_m4[:, 1] = l_mv.gather(1, columns_m[:, None]).squeeze(1) * inside_m
    out_m4[:, 2] = inside_m
    if entropy:
        out_m4[:, 3] = (l_mv.exp() * l_mv).sum(dim=1)
    return out_m4


def local_columns(targets_m: Tensor, start: int, num_local: int) -> tuple[Tensor, Tensor]:
    """Columns of the targets in this part, 0 for those outside, and which lie inside; [m] each."""
    columns_m = targets_m - start
    inside_m = (columns_m >= 0) & (columns_m < num_local)
    return columns_m.masked_fill(~inside_m, 0), inside_m


def join(parts_sm4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log-sum-exp of every token from the numbers of all parts; [m] each.

    lse = log sum_s exp(lse_s)      shift_s = lse_s - lse
    log p(target) = sum_s has_s (hit_s + shift_s)     entropy = - sum_s exp(shift_s) (mean_s + shift_s)
    """
    lse_sm, hit_sm, has_sm, mean_sm = parts_sm4.unbind(dim=-1)
    lse_m = lse_sm.logsumexp(dim=0)
    shift_sm = lse_sm - lse_m
    logprobs_m = (has_sm * (hit_sm + shift_sm)).sum(dim=0)
    entropy_m = -(shift_sm.exp() * (mean_sm + shift_sm)).sum(dim=0)
    return logprobs_m, entropy_m, lse_m


def joined_numbers(parts_sm4: Tensor) -> Tensor:
    """The four numbers of the union of all parts; [m, 4]."""
    logprobs_m, entropy_m, lse_m = join(parts_sm4)
    has_m = parts_sm4[..., 2].sum(dim=0)
    return torch.stack((lse_m, logprobs_m * has_m, has_m, -entropy_m), dim=-1)


def logit_gradient_(
    z_mv: Tensor,
    lse_m: Tensor,
    targets_m: Tensor,
    grad_m: Tensor,
    entropy_m: Tensor | None,
    grad_entropy_m: Tensor | None,
    *,
    start: int,
    temperature: float,
) -> Tensor:
    """Overwrite float32 logits (at the temperature) with the gradient of the loss by the raw logits; [m, v].

    With p = exp(z - lse) over the whole vocabulary and upstream gradients g of the log-probability and e of
    the entropy:  dz = (g (onehot(target) - p) - e p (log p + entropy)) / temperature.
    """
    if runs_triton(z_mv):
        return _logit_gradient_triton(
            z_mv, lse_m, targets_m, grad_m, entropy_m, grad_entropy_m, start, temperature
        )
    logp_mv = z_mv.sub_(lse_m[:, None])
    if entropy_m is not None and grad_entropy_m is not None:
        factor_mv = (logp_mv + entropy_m[:, None]).mul_(-grad_entropy_m[:, None])
        out_mv = logp_mv.exp_().mul_(factor_mv.sub_(grad_m[:, None]))
    else:
        out_mv = logp_mv.exp_().mul_(-grad_m[:, None])
    if out_mv.shape[1]:
        columns_m, inside_m = local_columns(targets_m, start, out_mv.shape[1])
        out_mv.scatter_add_(1, columns_m[:, None], (grad_m * inside_m)[:, None])
    return out_mv if temperature == 1.0 else out_mv.div_(temperature)


# --------------------------------------------------------------------------------------------- Triton forms


@jit
def _numbers_kernel(
    x_ptr,
    weight_ptr,
    targets_ptr,
    out_ptr,
    num_tokens,
    num_local,
    hidden,
    slice_columns,
    start,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
) -> Any:
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_tokens
    target = tl.load(targets_ptr + rows, mask=row_ok, other=-1) - start
    first = part * slice_columns
    end = tl.minimum(first + slice_columns, num_local)
    top = tl.full((ROWS,), -3.0e38, tl.float32)  # running maximum of z
    total = tl.zeros((ROWS,), tl.float32)  # sum exp(z - top)
    weighted = tl.zeros((ROWS,), tl.float32)  # sum exp(z - top) z
    hit = tl.zeros((ROWS,), tl.float32)
    for column in range(first, end, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        column_ok = columns < end
        z = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, hidden, DEPTH):
            at = depth + tl.arange(0, DEPTH)
            x = tl.load(
                x_ptr + rows[:, None].to(tl.int64) * hidden + at[None, :],
                mask=row_ok[:, None] & (at[None, :] < hidden),
                other=0.0,
            )
            w = tl.load(
                weight_ptr + columns[:, None].to(tl.int64) * hidden + at[None, :],
                mask=column_ok[:, None] & (at[None, :] < hidden),
                other=0.0,
            )
            if WIDEN:  # the interpreter takes bf16 for integers in a product
                x, w = x.to(tl.float32), w.to(tl.float32)
            z = tl.dot(x, tl.trans(w), z, input_precision="ieee")
        z = tl.where(column_ok[None, :], z * inverse_temperature, -3.0e38)
        higher = tl.maximum(top, tl.max(z, axis=1))
        scale = tl.exp(top - higher)
        e = tl.where(column_ok[None, :], tl.exp(z - higher[:, None]), 0.0)
        total = total * scale + tl.sum(e, axis=1)
        if ENTROPY:
            weighted = weighted * scale + tl.sum(e * z, axis=1)
        hit += tl.sum(tl.where((columns[None, :] == target[:, None]) & column_ok[None, :], z, 0.0), axis=1)
        top = higher
    has = (target >= first) & (target < end)
    is_empty = total == 0.0
    lse = tl.where(is_empty, -3.0e38, top + tl.log(tl.where(is_empty, 1.0, total)))
    out = out_ptr + (part * num_tokens + rows) * 4
    tl.store(out, lse, mask=row_ok)
    tl.store(out + 1, tl.where(has, hit - lse, 0.0), mask=row_ok)
    tl.store(out + 2, has.to(tl.float32), mask=row_ok)
    if ENTROPY:  # sum p (z - lse) = sum p z - lse
        mean = weighted / tl.where(is_empty, 1.0, total) - lse
        tl.store(out + 3, tl.where(is_empty, 0.0, mean), mask=row_ok)
    else:
        tl.store(out + 3, tl.zeros((ROWS,), tl.float32), mask=row_ok)


def _part_numbers_triton(
    x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, start: int, temperature: float, entropy: bool
) -> Tensor:
    num_tokens, hidden = x_mh.shape
    num_local = len(weight_vh)
    blocks = cdiv(num_tokens, ROWS)
    slices = max(1, min(cdiv(PROGRAMS, max(1, blocks)), cdiv(num_local, 4 * COLUMNS)))
    slice_columns = cdiv(cdiv(num_local, slices), COLUMNS) * COLUMNS
    parts_sm4 = torch.empty(slices, num_tokens, 4, dtype=torch.float32, device=x_mh.device)
    if num_tokens:
        _numbers_kernel[(blocks, slices)](
            x_mh.contiguous(),
            weight_vh.contiguous(),
            targets_m,
            parts_sm4,
            num_tokens,
            num_local,
            hidden,
            slice_columns,
            start,
            1.0 / temperature,
            ENTROPY=entropy,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            WIDEN=INTERPRETED and x_mh.dtype != torch.float32,
        )
    if slices == 1:
        return parts_sm4[0]
    out_m4 = joined_numbers(parts_sm4)
    if not entropy:
        out_m4[:, 3] = 0.0
    return out_m4


@jit
def _gradient_kernel(
    z_ptr,
    lse_ptr,
    targets_ptr,
    grad_ptr,
    entropy_ptr,
    grad_entropy_ptr,
    num_local,
    start,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = columns < num_local
    at = z_ptr + row.to(tl.int64) * num_local + columns
    logp = tl.load(at, mask=ok, other=0.0) - tl.load(lse_ptr + row)
    grad = tl.load(grad_ptr + row)
    factor = -grad
    if ENTROPY:
        factor = factor - tl.load(grad_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    dz = tl.exp(logp) * factor
    dz += tl.where(columns == tl.load(targets_ptr + row) - start, grad, 0.0)
    tl.store(at, dz * inverse_temperature, mask=ok)


def _logit_gradient_triton(
    z_mv: Tensor,
    lse_m: Tensor,
    targets_m: Tensor,
    grad_m: Tensor,
    entropy_m: Tensor | None,
    grad_entropy_m: Tensor | None,
    start: int,
    temperature: float,
) -> Tensor:
    num_tokens, num_local = z_mv.shape
    with_entropy = entropy_m is not None and grad_entropy_m is not None
    if num_tokens and num_local:
        columns = 1024
        _gradient_kernel[(num_tokens, cdiv(num_local, columns))](
            z_mv,
            lse_m.contiguous(),
            targets_m.contiguous(),
            grad_m.contiguous(),
            entropy_m.contiguous() if entropy_m is not None else lse_m,
            grad_entropy_m.contiguous() if grad_entropy_m is not None else lse_m,
            num_local,
            start,
            1.0 / temperature,
            ENTROPY=with_entropy,
            COLUMNS=columns,
        )
    return z_mv
