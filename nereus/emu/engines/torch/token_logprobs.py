"""Log-probabilities and entropies of given tokens: output head and softmax fused, over a cut vocabulary.

Letters: m tokens, c tokens of one chunk, h hidden, v this rank's part of the vocabulary, r ranks of the
tensor-parallel group.

Each rank turns its part into four numbers a token (`nereus.kernels.vocabulary`), on a GPU without making
logits at all, elsewhere a bounded number of tokens at a time. One all-gather of [m, 4] joins them, so no
logits cross ranks and their number does not set the peak memory. Few logits are kept for the backward pass
(`KEEP_BYTES`, on CPUs); many are made again, chunk by chunk.
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
from nereus.kernels.dispatch import runs_triton
from nereus.kernels.vocabulary import LEAST, join, local_columns, logit_gradient_, part_numbers

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


def _may_keep(num_tokens: int, num_local: int) -> bool:
    return 4 * num_tokens * num_local <= KEEP_BYTES


def _chunks(num_tokens: int, num_local: int, *, keep: bool) -> Iterator[slice]:
    """The tokens in chunks whose logits are bounded; in one where all logits are kept."""
    rows = max(1, num_tokens if keep else CHUNK_BYTES // (4 * max(1, num_local)))
    return (slice(lo, min(num_tokens, lo + rows)) for lo in range(0, num_tokens, rows))


def _numbers(
    x_ch: Tensor, weight_vh: Tensor, targets_c: Tensor, head: _Head, entropy: bool, out_c4: Tensor
) -> Tensor:
    """Write one chunk's four numbers; returns its log-softmax within the part, [c, v]."""
    z_cv = head.logits(x_ch, weight_vh)
    if z_cv.shape[1] == 0:  # more ranks than rows of the vocabulary; a finite number keeps 0 * lse at 0
        out_c4[:, 0] = LEAST
        return z_cv
    logprobs_cv = z_cv.log_softmax(dim=1)
    columns_c, inside_c = local_columns(targets_c, head.start, z_cv.shape[1])
    out_c4[:, 0] = z_cv[:, 0] - logprobs_cv[:, 0]
    out_c4[:, 1] = logprobs_cv.gather(1, columns_c[:, None]).squeeze(1)
    out_c4[:, 2] = inside_c
    if entropy:
        out_c4[:, 3] = torch.linalg.vecdot(torch.exp(logprobs_cv, out=z_cv), logprobs_cv)
    return logprobs_cv


def _all_parts(own_m4: Tensor, group: ProcessGroup | None) -> Tensor:
    """The numbers of every rank; [r, m, 4]."""
    if group is None:
        return own_m4.unsqueeze(0)
    parts = [torch.empty_like(own_m4) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own_m4, group=group)
    return torch.stack(parts)


@dataclass(frozen=True, slots=True)
class _Joined:
    """Log-probability, entropy and log-sum-exp over the whole vocabulary, [m] each; and, for the backward
    pass, all log-softmaxes within the part with what their own log-sum-exp lacks, where they may be kept.
    """

    logprobs_m: Tensor
    entropy_m: Tensor
    lse_m: Tensor
    kept_mv: Tensor | None
    lacks_m: Tensor


def _forward(x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, head: _Head, entropy: bool) -> _Joined:
    kept_mv: Tensor | None = None
    if runs_triton(x_mh):
        own_m4 = part_numbers(
            x_mh, weight_vh, targets_m, start=head.start, temperature=head.temperature, entropy=entropy
        )
    else:
        own_m4 = torch.zeros(len(x_mh), 4, dtype=torch.float32, device=x_mh.device)
        keep = _may_keep(len(x_mh), len(weight_vh))
        for rows in _chunks(len(x_mh), len(weight_vh), keep=keep):
            part_cv = _numbers(x_mh[rows], weight_vh, targets_m[rows], head, entropy, own_m4[rows])
            kept_mv = part_cv if keep else None
    logprobs_m, entropy_m, lse_m = join(_all_parts(own_m4, head.group))
    return _Joined(logprobs_m, entropy_m, lse_m, kept_mv, lse_m - own_m4[:, 0])


def _backward(ctx: Any, grad_m: Tensor, grad_entropy_m: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of this rank's part: of the hidden states, not yet summed over ranks, and of the weight,
    None where that is frozen.
    """
    x_mh, weight_vh, targets_m, lse_m, entropy_m = ctx.saved_tensors
    head: _Head = ctx.head
    grad_x_mh = torch.empty_like(x_mh)
    grad_weight_vh: Tensor | None = None
    trains = ctx.needs_input_grad[1]
    for rows in _chunks(len(x_mh), len(weight_vh), keep=ctx.kept_mv is not None):
        z_cv = head.logits(x_mh[rows], weight_vh) if ctx.kept_mv is None else ctx.kept_mv
        narrow_cv = logit_gradient_(
            z_cv,
            lse_m[rows],
            targets_m[rows],
            grad_m[rows],
            entropy_m[rows] if ctx.entropy else None,
            grad_entropy_m[rows] if ctx.entropy else None,
            start=head.start,
            temperature=head.temperature,
        ).to(x_mh.dtype)
        grad_x_mh[rows] = product(narrow_cv, weight_vh.t())
        if not trains:
            continue
        part_vh = product(narrow_cv.t(), x_mh[rows].t()).float()
        grad_weight_vh = part_vh if grad_weight_vh is None else grad_weight_vh.add_(part_vh)
    if trains and grad_weight_vh is None:  # no tokens
        grad_weight_vh = torch.zeros_like(weight_vh, dtype=torch.float32)
    return grad_x_mh, grad_weight_vh


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, head: _Head, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        joined = _forward(x_mh, weight_vh, targets_m, head, entropy)
        ctx.head, ctx.entropy, ctx.kept_mv = head, entropy, joined.kept_mv
        lse_m = joined.lse_m if joined.kept_mv is None else joined.lacks_m
        ctx.save_for_backward(x_mh, weight_vh, targets_m, lse_m, joined.entropy_m)
        return joined.logprobs_m, joined.entropy_m

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
        joined = _forward(x_mh, weight_vh, targets_m, head, entropy)
        logprobs_m, entropy_m = joined.logprobs_m, joined.entropy_m
    return logprobs_m, entropy_m if entropy else None
