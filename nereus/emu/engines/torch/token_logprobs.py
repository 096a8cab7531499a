"""Log-probabilities and entropies of given tokens: output head and softmax fused, over a cut vocabulary.

Letters: m tokens, c tokens of one chunk, h hidden, v this rank's part of the vocabulary, r ranks of the
tensor-parallel group.

Each rank makes logits z of its own part, a bounded number of tokens at a time, takes their log-softmax within
the part, l = z - lse_r, and keeps four numbers a token:

    lse_r     hit_r = l[target], or 0     has_r = 1 where the target is in the part     mean_r = sum exp(l) l

One all-gather of [m, 4] joins them, so no logits cross ranks and their number does not set the peak memory:

    lse = log sum_r exp(lse_r)      shift_r = lse_r - lse
    log p(target) = sum_r has_r (hit_r + shift_r)      entropy = - sum_r exp(shift_r) (mean_r + shift_r)

Backward, with p = exp(l + shift_r) and upstream gradients g (log-probability) and e (entropy):

    dz = g (onehot(target) - p) - e p (log p + entropy)

Few logits are kept for it (`KEEP_BYTES`); many are made again, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.engines.torch.product import product

KEEP_BYTES = 256 << 20  # float32 logits kept from the forward to the backward pass at most
CHUNK_BYTES = 64 << 20  # float32 logits made at once where there are more


@dataclass(frozen=True, slots=True)
class _Head:
    """The output head on one rank: where its part of the vocabulary starts, the temperature, the group."""

    start: int
    temperature: float
    group: ProcessGroup | None

    def logits(self, x_ch: Tensor, weight_vh: Tensor) -> Tensor:
        """Float32 logits of this part at the temperature, [c, v]."""
        z_cv = product(x_ch, weight_vh).float()
        return z_cv if self.temperature == 1.0 else z_cv.div_(self.temperature)

    def local(self, targets_c: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Columns of the targets in this part [c, 1], and which of them lie in it [c]."""
        columns_c = targets_c - self.start
        inside_c = (columns_c >= 0) & (columns_c < num_local)
        return columns_c.masked_fill(~inside_c, 0).unsqueeze(1), inside_c


def _chunks(num_tokens: int, num_local: int) -> tuple[bool, Iterator[slice]]:
    """Whether all logits may be kept, and the chunks: one if so."""
    keep = 4 * num_tokens * num_local <= KEEP_BYTES
    rows = max(1, num_tokens if keep else CHUNK_BYTES // (4 * num_local))
    return keep, (slice(lo, min(num_tokens, lo + rows)) for lo in range(0, num_tokens, rows))


def _numbers(
    x_ch: Tensor, weight_vh: Tensor, targets_c: Tensor, head: _Head, entropy: bool, out_c4: Tensor
) -> Tensor:
    """Write one chunk's four numbers; returns its log-softmax within the part, [c, v]."""
    z_cv = head.logits(x_ch, weight_vh)
    if z_cv.shape[1] == 0:  # more ranks than rows of the vocabulary; a finite number keeps 0 * lse at 0
        out_c4[:, 0] = torch.finfo(torch.float32).min
        return z_cv
    logprobs_cv = z_cv.log_softmax(dim=1)
    columns_c1, inside_c = head.local(targets_c, z_cv.shape[1])
    out_c4[:, 0] = z_cv[:, 0] - logprobs_cv[:, 0]
    out_c4[:, 1] = logprobs_cv.gather(1, columns_c1).squeeze(1)
    out_c4[:, 2] = inside_c
    if entropy:
        out_c4[:, 3] = torch.linalg.vecdot(torch.exp(logprobs_cv, out=z_cv), logprobs_cv)
    return logprobs_cv


def _join(own_m4: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy of every token from all ranks' numbers, and this rank's shift; [m] each."""
    if group is None:
        parts_rm4 = own_m4.unsqueeze(0)
    else:
        parts = [torch.empty_like(own_m4) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own_m4, group=group)
        parts_rm4 = torch.stack(parts)
    lse_rm, hit_rm, has_rm, mean_rm = parts_rm4.unbind(dim=-1)
    lse_m = lse_rm.logsumexp(dim=0)
    shift_rm = lse_rm - lse_m
    logprobs_m = (has_rm * (hit_rm + shift_rm)).sum(dim=0)
    entropy_m = -(shift_rm.exp() * (mean_rm + shift_rm)).sum(dim=0)
    return logprobs_m, entropy_m, own_m4[:, 0] - lse_m


def _forward(
    x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, head: _Head, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log-probabilities, entropies, this rank's shifts, and all log-softmaxes where they may be kept."""
    own_m4 = torch.zeros(len(x_mh), 4, dtype=torch.float32, device=x_mh.device)
    keep, chunks = _chunks(len(x_mh), len(weight_vh))
    kept_mv: Tensor | None = None
    for rows in chunks:
        part_cv = _numbers(x_mh[rows], weight_vh, targets_m[rows], head, entropy, own_m4[rows])
        kept_mv = part_cv if keep else None
    return *_join(own_m4, head.group), kept_mv


def _backward(ctx: Any, grad_m: Tensor, grad_entropy_m: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's part: of the hidden states, not yet summed over ranks, and of the weight."""
    x_mh, weight_vh, targets_m, shift_m, entropy_m = ctx.saved_tensors
    head: _Head = ctx.head
    grad_x_mh = torch.empty_like(x_mh)
    grad_weight_vh: Tensor | None = None
    for rows in _chunks(len(x_mh), len(weight_vh))[1]:
        grad_c1 = grad_m[rows, None]
        logprobs_cv = ctx.kept_mv
        if logprobs_cv is None:
            logprobs_cv = head.logits(x_mh[rows], weight_vh).log_softmax(dim=1)
        if head.group is not None:
            logprobs_cv.add_(shift_m[rows, None])
        if ctx.entropy:
            factor_cv = (logprobs_cv + entropy_m[rows, None]).mul_(-grad_entropy_m[rows, None])
            grad_z_cv = logprobs_cv.exp_().mul_(factor_cv.sub_(grad_c1))
        else:
            grad_z_cv = logprobs_cv.exp_().mul_(-grad_c1)
        if len(weight_vh):
            columns_c1, inside_c = head.local(targets_m[rows], len(weight_vh))
            grad_z_cv.scatter_add_(1, columns_c1, grad_c1 * inside_c[:, None])
        if head.temperature != 1.0:
            grad_z_cv.div_(head.temperature)
        narrow_cv = grad_z_cv.to(x_mh.dtype)
        grad_x_mh[rows] = product(narrow_cv, weight_vh.t())
        part_vh = product(narrow_cv.t(), x_mh[rows].t()).float()
        grad_weight_vh = part_vh if grad_weight_vh is None else grad_weight_vh.add_(part_vh)
    if grad_weight_vh is None:  # no tokens
        grad_weight_vh = torch.zeros_like(weight_vh, dtype=torch.float32)
    return grad_x_mh, grad_weight_vh


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, head: _Head, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_m, entropy_m, shift_m, ctx.kept_mv = _forward(x_mh, weight_vh, targets_m, head, entropy)
        ctx.head, ctx.entropy = head, entropy
        ctx.save_for_backward(x_mh, weight_vh, targets_m, shift_m, entropy_m)
        return logprobs_m, entropy_m

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_m: Tensor, grad_entropy_m: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_mh, grad_weight_vh = _backward(ctx, grad_m, grad_entropy_m)
        ctx.kept_mv = None  # overwritten
        if ctx.head.group is not None:
            dist.all_reduce(grad_x_mh, group=ctx.head.group)
        return grad_x_mh, grad_weight_vh, None, None, None


def token_logprobs(
    x_mh: Tensor,
    weight_vh: Tensor,
    targets_m: Tensor,
    *,
    vocab_start: int,
    temperature: float,
    entropy: bool,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(x W^T / temperature)[target] and, if asked, the entropy in nats; float32 [m] each.

    `weight_vh` holds the rows from token id `vocab_start` on, without padding; it may hold none. Collective
    over `group`, forwards and backwards; results are equal on every rank, and so is the gradient of `x_mh`.
    The backward pass runs once: it overwrites what the forward pass kept.
    """
    head = _Head(vocab_start, temperature, group)
    if torch.is_grad_enabled():
        logprobs_m, entropy_m = _TokenLogprobs.apply(x_mh, weight_vh, targets_m, head, entropy)  # type: ignore[no-untyped-call]
    else:
        logprobs_m, entropy_m, _, _ = _forward(x_mh, weight_vh, targets_m, head, entropy)
    return logprobs_m, entropy_m if entropy else None
