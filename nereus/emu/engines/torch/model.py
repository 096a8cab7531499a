"""The decoder as pure functions of a stage's weights; training, scoring and generation share them.

Letters: n tokens (packed or not; the functions do not care), m chosen tokens, h hidden, q query heads of this
rank, k key-value heads of this rank, d head width, v this rank's part of the vocabulary.

    tokens_n --embed--> x_nh --run_layers(attend)--> x_nh --final_norm--> x_mh --> local_logits | values
                         ^ a later pipeline stage starts here    ^ an earlier stage ends here

What happens between queries, keys and values is the caller's: `Attend` is causal attention over rows in
training and scoring, and attention over a cache in generation.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nereus.emu.engines.torch.adapters import adapted
from nereus.emu.engines.torch.clock import span
from nereus.emu.engines.torch.collectives import copy_to, reduce_from
from nereus.emu.engines.torch.experts import mixture
from nereus.emu.engines.torch.product import product
from nereus.emu.engines.torch.rms_norm import rms_norm
from nereus.emu.engines.torch.rope import rotate
from nereus.emu.engines.torch.rows import take_rows
from nereus.emu.engines.torch.swiglu import swiglu
from nereus.emu.engines.torch.weights import LayerWeights, StageWeights


class Attend(Protocol):
    """Attention of one layer over whatever keys and values the caller keeps."""

    def __call__(self, layer: int, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side, [n, q * d]. `layer` counts from 0 within the stage. Queries and keys
        are already rotated; inputs may be strided views."""
        ...


def embed(tokens_n: Tensor, stage: StageWeights) -> Tensor:
    """Rows of the vocabulary-parallel embedding, whole on every rank; [n, h]."""
    assert stage.embed is not None, "only the first stage embeds"
    if stage.tp is None:
        return F.embedding(tokens_n, stage.embed)
    lo, hi = stage.vocab
    if (
        lo == hi
    ):  # more ranks than rows: this one adds zeros, and still takes part in every backward collective
        x_nh = stage.embed.new_zeros(len(tokens_n), stage.config.hidden_size)
        trains = torch.is_grad_enabled() and stage.embed.requires_grad
        return reduce_from(x_nh, stage.tp).requires_grad_(trains)
    local_n = tokens_n - lo
    outside_n = (local_n < 0) | (local_n >= hi - lo)
    x_nh = F.embedding(local_n.masked_fill(outside_n, 0), stage.embed)
    return reduce_from(x_nh.masked_fill(outside_n[:, None], 0.0), stage.tp)


def run_layers(
    x_nh: Tensor,
    stage: StageWeights,
    rotation: tuple[Tensor, Tensor],
    attend: Attend,
    *,
    select_m: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """The stage's layers; `rotation` is `RopeTable.at(positions)`.

    With `select_m`, only these distinct rows leave the last layer, and its output product and MLP are spent
    on them alone: [m, h]. `recompute` keeps only the layers' inputs for the backward pass.
    """
    last = len(stage.layers) - 1
    for index, layer in enumerate(stage.layers):
        chosen_m = select_m if index == last else None
        if recompute and torch.is_grad_enabled():
            x_nh = checkpoint(
                decoder_layer, x_nh, layer, stage, index, rotation, attend, chosen_m, use_reentrant=False
            )
        else:
            x_nh = decoder_layer(x_nh, layer, stage, index, rotation, attend, chosen_m)
    return x_nh


def decoder_layer(
    x_nh: Tensor,
    layer: LayerWeights,
    stage: StageWeights,
    index: int,
    rotation: tuple[Tensor, Tensor],
    attend: Attend,
    select_m: Tensor | None = None,
) -> Tensor:
    """Attention and MLP with their norms and residuals; [n, h], or [m, h] with `select_m`."""
    eps, tp = stage.config.norm_eps, stage.tp
    normed_nh = copy_to(rms_norm(x_nh, layer.input_norm, eps), tp)
    q_nqd, k_nkd, v_nkd = queries_keys_values(normed_nh, layer, stage, rotation)
    heads_n = attend(index, q_nqd, k_nkd, v_nkd)
    if select_m is not None:
        heads_n, x_nh = take_rows(heads_n, select_m), take_rows(x_nh, select_m)
    attended_nh = reduce_from(adapted(heads_n, layer.out, None, layer.adapters.out), tp)
    if layer.out_bias is not None:
        attended_nh = attended_nh + layer.out_bias
    x_nh = x_nh + attended_nh
    normed_nh = copy_to(rms_norm(x_nh, layer.post_norm, eps), tp)
    return x_nh + reduce_from(feed_forward(normed_nh, layer, stage), tp)


def feed_forward(x_nh: Tensor, layer: LayerWeights, stage: StageWeights) -> Tensor:
    """This rank's part of the MLP, or of the mixture of experts; [n, h]."""
    shape = stage.config.experts
    if shape is not None and layer.experts is not None:
        return mixture(x_nh, layer.experts, shape, stage.ep)
    assert layer.gate_up is not None, "a layer without experts has an MLP"
    assert layer.down is not None, "a layer without experts has an MLP"
    gated_ni = swiglu(adapted(x_nh, layer.gate_up, None, layer.adapters.gate_up))
    return adapted(gated_ni, layer.down, None, layer.adapters.down)


def queries_keys_values(
    x_nh: Tensor, layer: LayerWeights, stage: StageWeights, rotation: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's rotated queries and keys, and values: [n, q, d], [n, k, d], [n, k, d]."""
    d, eps = stage.config.head_dim, stage.config.norm_eps
    num_query, num_kv = layer.num_query, layer.num_kv
    qkv = adapted(x_nh, layer.qkv, layer.qkv_bias, layer.adapters.qkv).view(-1, num_query + 2 * num_kv, d)
    if layer.q_norm is None or layer.k_norm is None:
        qk, v_nkd = torch.split(qkv, [num_query + num_kv, num_kv], dim=1)
        q_nqd, k_nkd = torch.split(rotate(qk, *rotation), [num_query, num_kv], dim=1)
        return q_nqd, k_nkd, v_nkd
    q_nqd, k_nkd, v_nkd = torch.split(qkv, [num_query, num_kv, num_kv], dim=1)
    q_nqd = rotate(rms_norm(q_nqd, layer.q_norm, eps), *rotation)
    k_nkd = rotate(rms_norm(k_nkd, layer.k_norm, eps), *rotation)
    return q_nqd, k_nkd, v_nkd


def final_norm(x_mh: Tensor, stage: StageWeights) -> Tensor:
    """The last stage's norm; [m, h]."""
    assert stage.norm is not None, "only the last stage has the final norm"
    return rms_norm(x_mh, stage.norm, stage.config.norm_eps)


def local_logits(x_mh: Tensor, stage: StageWeights) -> Tensor:
    """Logits of this rank's token ids `stage.vocab` (no pad columns) from normed hidden states; [m, v]."""
    assert stage.head is not None, "only the last stage of a language model has the head"
    return product(x_mh, stage.head)


def full_logits(x_mh: Tensor, stage: StageWeights) -> Tensor:
    """Logits of the whole vocabulary on every rank of the stage, for decoding and tests; no gradient."""
    part_mv = local_logits(x_mh, stage)
    if stage.tp is None:
        return part_mv
    part_mv = F.pad(part_mv, (0, stage.vocab_stored - part_mv.shape[1]))
    parts = [torch.empty_like(part_mv) for _ in range(dist.get_world_size(stage.tp))]
    with span("tensor_parallel"):
        dist.all_gather(parts, part_mv, group=stage.tp)
    return torch.cat(parts, dim=1)[:, : stage.config.vocab_size]


def values(x_mh: Tensor, score: Tensor) -> Tensor:
    """The value head `score` [1, h] on normed hidden states; float32 [m]."""
    return F.linear(x_mh, score).float().squeeze(-1)
