"""Attention of some queries over some keys, with what is needed to merge it with attention over others.

Letters: q query tokens, s key tokens, h query heads, k key-value heads, d head width.

A block's output is a softmax over its own keys. Two blocks of the same queries merge by their log-sum-exps
(Milakov and Gimelshein 2018). A block's gradients need only the log-sum-exp over all keys and the merged
output (Dao et al. 2022, algorithm 4), so blocks need not be kept. CPUs and half precision on GPUs use torch's
fused kernels, which take and give these numbers; `plain` is the definition.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Block = tuple[Tensor, Tensor]  # output [q, h, d], float32 log-sum-exp [q, h]
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def attend(q_qhd: Tensor, k_skd: Tensor, v_skd: Tensor, *, causal: bool) -> Block:
    """Attention over these keys alone; `causal` where query i may see keys up to i."""
    q, k, v = _heads(q_qhd, k_skd, v_skd)
    if q.is_cpu:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif _is_half(q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        return plain(q_qhd, k_skd, v_skd, causal=causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1).float()


def attend_backward(
    grad_qhd: Tensor,
    q_qhd: Tensor,
    k_skd: Tensor,
    v_skd: Tensor,
    out_qhd: Tensor,
    lse_qh: Tensor,
    *,
    causal: bool,
) -> Gradients:
    """The block's share of the gradients; `out_qhd` and `lse_qh` are over all keys of these queries."""
    q, k, v = _heads(q_qhd, k_skd, v_skd)
    grad, out = (x.transpose(0, 1)[None].contiguous() for x in (grad_qhd, out_qhd))
    lse = lse_qh.transpose(0, 1)[None].contiguous()
    if q.is_cpu:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    elif _is_half(q):
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, none, none, q.shape[2], k.shape[2], 0.0, causal, none, none
        )
    else:
        return plain_backward(grad_qhd, q_qhd, k_skd, v_skd, out_qhd, lse_qh, causal=causal)
    grad_q, grad_k, grad_v = (x[0].transpose(0, 1) for x in grads)
    return grad_q, _grouped(grad_k, k_skd), _grouped(grad_v, v_skd)


def merge(one: Block, other: Block) -> Block:
    """Attention over the keys of both, in float32."""
    (out_a, lse_a), (out_b, lse_b) = one, other
    lse_qh = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = (torch.exp(lse - lse_qh)[..., None] for lse in (lse_a, lse_b))
    return out_a.float() * share_a + out_b.float() * share_b, lse_qh


def plain(q_qhd: Tensor, k_skd: Tensor, v_skd: Tensor, *, causal: bool) -> Block:
    """`attend` by its definition, in float32."""
    scores_hqs = _scores(q_qhd, k_skd, causal)
    lse_hq = scores_hqs.logsumexp(dim=-1)
    probs_hqs = torch.exp(scores_hqs - lse_hq[..., None])
    out_hqd = probs_hqs @ _spread(v_skd, q_qhd).float().transpose(0, 1)
    return out_hqd.transpose(0, 1).to(q_qhd.dtype), lse_hq.transpose(0, 1)


def plain_backward(
    grad_qhd: Tensor,
    q_qhd: Tensor,
    k_skd: Tensor,
    v_skd: Tensor,
    out_qhd: Tensor,
    lse_qh: Tensor,
    *,
    causal: bool,
) -> Gradients:
    """`attend_backward` by its definition."""
    scale = 1.0 / math.sqrt(q_qhd.shape[-1])
    probs_hqs = torch.exp(_scores(q_qhd, k_skd, causal) - lse_qh.transpose(0, 1)[..., None])
    grad_hqd = grad_qhd.float().transpose(0, 1)
    own_hq = (grad_hqd * out_qhd.float().transpose(0, 1)).sum(dim=-1)
    grad_v = probs_hqs.transpose(1, 2) @ grad_hqd
    toward_hqs = grad_hqd @ _spread(v_skd, q_qhd).float().permute(1, 2, 0)
    grad_scores_hqs = probs_hqs * (toward_hqs - own_hq[..., None]) * scale
    grad_q = grad_scores_hqs @ _spread(k_skd, q_qhd).float().transpose(0, 1)
    grad_k = grad_scores_hqs.transpose(1, 2) @ q_qhd.float().transpose(0, 1)
    return (
        grad_q.transpose(0, 1).to(q_qhd.dtype),
        _grouped(grad_k.transpose(0, 1), k_skd),
        _grouped(grad_v.transpose(0, 1), v_skd),
    )


def _is_half(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _spread(x_skd: Tensor, q_qhd: Tensor) -> Tensor:
    """Each kv head once for every query head of its group."""
    return x_skd.repeat_interleave(q_qhd.shape[1] // x_skd.shape[1], dim=1)


def _grouped(grad_shd: Tensor, x_skd: Tensor) -> Tensor:
    """The gradient of kv heads from that of their copies."""
    num_tokens, num_kv, head_dim = x_skd.shape
    return grad_shd.reshape(num_tokens, num_kv, -1, head_dim).sum(dim=2).to(x_skd.dtype)


def _heads(q_qhd: Tensor, k_skd: Tensor, v_skd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the fused kernels want them: [1, h, tokens, d], one kv head a query head."""
    k_shd, v_shd = _spread(k_skd, q_qhd), _spread(v_skd, q_qhd)
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q_qhd, k_shd, v_shd))
    return q, k, v


def _scores(q_qhd: Tensor, k_skd: Tensor, causal: bool) -> Tensor:
    q_hqd, k_hsd = q_qhd.float().transpose(0, 1), _spread(k_skd, q_qhd).float().transpose(0, 1)
    scores_hqs = torch.matmul(q_hqd, k_hsd.transpose(1, 2)) / math.sqrt(q_qhd.shape[-1])
    if not causal:
        return scores_hqs
    hidden_qs = torch.ones(scores_hqs.shape[1:], dtype=torch.bool, device=q_qhd.device).triu(1)
    return scores_hqs.masked_fill(hidden_qs, float("-inf"))
