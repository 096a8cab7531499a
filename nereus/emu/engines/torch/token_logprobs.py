"""Log-probabilities and entropies of given tokens: output head and softmax fused, over a cut vocabulary.

Letters: m tokens, h hidden, v this rank's part of the vocabulary, r ranks of the tensor-parallel group.

Each rank makes logits of its own part, a bounded number of rows at a time, and keeps four numbers per token:

    top = max z    mass = sum exp(z - top)    moment = sum exp(z - top) (z - top)    hit = z[target], or 0

One all-gather of [m, 4] joins them, so no logits cross ranks and their number does not set the peak memory:

    lse = log sum_r mass_r exp(top_r - top) + top      log p(target) = sum_r hit_r - lse
    entropy = lse - sum_r exp(top_r - top) (moment_r + top_r mass_r) / sum_r mass_r exp(top_r - top)

Backward, with p = exp(z - lse) and upstream gradients g (log-probability) and e (entropy):

    dz = g (onehot(target) - p) - e p (z - lse + entropy)

Small parts keep their logits for it (`KEEP_BYTES`), larger ones make them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

CHUNK_BYTES = 64 << 20  # float32 logits held at once while they are made into numbers
KEEP_BYTES = 256 << 20  # logits kept for the backward pass; above it they are computed twice


@dataclass(frozen=True, slots=True)
class _Head:
    """The output head on one rank: where its part of the vocabulary starts, the temperature, the group."""

    start: int
    temperature: float
    group: ProcessGroup | None

    def logits(self, x_ch: Tensor, weight_vh: Tensor) -> Tensor:
        return x_ch @ weight_vh.t()

    def tempered(self, raw_cv: Tensor) -> Tensor:
        """Float32 logits at the temperature; overwrites float32 input."""
        wide_cv = raw_cv.float()
        return wide_cv if self.temperature == 1.0 else wide_cv.div_(self.temperature)

    def local(self, targets_c: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Columns of the targets in this part, and which of them lie in it."""
        columns_c = targets_c - self.start
        inside_c = (columns_c >= 0) & (columns_c < num_local)
        return columns_c.masked_fill(~inside_c, 0), inside_c


def _chunks(num_tokens: int, num_local: int) -> Iterator[slice]:
    rows = max(1, CHUNK_BYTES // (4 * max(1, num_local)))
    for lo in range(0, num_tokens, rows):
        yield slice(lo, min(num_tokens, lo + rows))


def _numbers(z_cv: Tensor, targets_c: Tensor, head: _Head, entropy: bool, out_c4: Tensor) -> None:
    """Write top, mass, moment and hit of one chunk; `z_cv` is overwritten."""
    num_local = z_cv.shape[1]
    if num_local == 0:
        out_c4[:, 0] = torch.finfo(torch.float32).min
        return
    columns_c, inside_c = head.local(targets_c, num_local)
    out_c4[:, 3] = z_cv.gather(1, columns_c[:, None]).squeeze(1).masked_fill_(~inside_c, 0.0)
    top_c1 = z_cv.amax(dim=1, keepdim=True)
    z_cv.sub_(top_c1)
    mass_cv = z_cv.exp() if entropy else z_cv.exp_()
    out_c4[:, 0] = top_c1.squeeze(1)
    out_c4[:, 1] = mass_cv.sum(dim=1)
    if entropy:
        out_c4[:, 2] = torch.linalg.vecdot(mass_cv, z_cv)


def _join(own_m4: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and log-sum-exp of every token from all ranks' numbers; [m] each."""
    if head.group is None:
        parts_rm4 = own_m4.unsqueeze(0)
    else:
        parts = [torch.empty_like(own_m4) for _ in range(dist.get_world_size(head.group))]
        dist.all_gather(parts, own_m4, group=head.group)
        parts_rm4 = torch.stack(parts)
    top_rm, mass_rm, moment_rm, hit_rm = parts_rm4.unbind(dim=-1)
    top_m = top_rm.amax(dim=0)
    scale_rm = (top_rm - top_m).exp()
    mass_m = (mass_rm * scale_rm).sum(dim=0)
    # Moments are taken about the common top, which cancels in the entropy.
    mean_m = (scale_rm * (moment_rm + (top_rm - top_m) * mass_rm)).sum(dim=0) / mass_m
    log_mass_m = mass_m.log()
    lse_m = top_m + log_mass_m
    return hit_rm.sum(dim=0) - lse_m, log_mass_m - mean_m, lse_m


def _forward(
    x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, head: _Head, entropy: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    own_m4 = torch.zeros(len(x_mh), 4, dtype=torch.float32, device=x_mh.device)
    kept: list[Tensor] = []
    for rows in _chunks(len(x_mh), len(weight_vh)):
        raw_cv = head.logits(x_mh[rows], weight_vh)
        if keep:
            kept.append(raw_cv)
            raw_cv = raw_cv.clone() if raw_cv.dtype == torch.float32 else raw_cv
        _numbers(head.tempered(raw_cv), targets_m[rows], head, entropy, own_m4[rows])
    return *_join(own_m4, head), kept


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_mh: Tensor, weight_vh: Tensor, targets_m: Tensor, head: _Head, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        keep = len(x_mh) * len(weight_vh) * x_mh.element_size() <= KEEP_BYTES
        logprobs_m, entropy_m, lse_m, ctx.kept = _forward(x_mh, weight_vh, targets_m, head, entropy, keep)
        ctx.head, ctx.entropy = head, entropy
        ctx.save_for_backward(x_mh, weight_vh, targets_m, lse_m, entropy_m)
        return logprobs_m, entropy_m

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_m: Tensor, grad_entropy_m: Tensor) -> tuple[Tensor | None, ...]:
        x_mh, weight_vh, targets_m, lse_m, entropy_m = ctx.saved_tensors
        head: _Head = ctx.head
        grad_x_mh = torch.empty_like(x_mh)
        grad_weight_vh = torch.zeros_like(weight_vh, dtype=torch.float32)
        for index, rows in enumerate(_chunks(len(x_mh), len(weight_vh))):
            raw_cv = ctx.kept[index] if ctx.kept else head.logits(x_mh[rows], weight_vh)
            z_cv = head.tempered(raw_cv).sub_(lse_m[rows, None])
            upstream_c = grad_m[rows]
            if ctx.entropy:
                coefficient_cv = (z_cv + entropy_m[rows, None]).mul_(-grad_entropy_m[rows, None])
                grad_z_cv = z_cv.exp_().mul_(coefficient_cv.sub_(upstream_c[:, None]))
            else:
                grad_z_cv = z_cv.exp_().mul_(-upstream_c[:, None])
            if len(weight_vh):
                columns_c, inside_c = head.local(targets_m[rows], len(weight_vh))
                grad_z_cv.scatter_add_(1, columns_c[:, None], (upstream_c * inside_c)[:, None])
            if head.temperature != 1.0:
                grad_z_cv.div_(head.temperature)
            narrow_cv = grad_z_cv.to(x_mh.dtype)
            torch.mm(narrow_cv, weight_vh, out=grad_x_mh[rows])
            if x_mh.dtype == torch.float32:
                grad_weight_vh.addmm_(narrow_cv.t(), x_mh[rows])
            else:
                grad_weight_vh += narrow_cv.t() @ x_mh[rows]
        ctx.kept = []
        if head.group is not None:
            dist.all_reduce(grad_x_mh, group=head.group)
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
    """
    head = _Head(vocab_start, temperature, group)
    if torch.is_grad_enabled():
        logprobs_m, entropy_m = _TokenLogprobs.apply(x_mh, weight_vh, targets_m, head, entropy)  # type: ignore[no-untyped-call]
    else:
        logprobs_m, entropy_m, _, _ = _forward(x_mh, weight_vh, targets_m, head, entropy, keep=False)
    return logprobs_m, entropy_m if entropy else None
