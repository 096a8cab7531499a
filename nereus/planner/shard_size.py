"""How much of a decoder one rank of a (tp, pp, ep) layout holds: heads, weights, keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.emu.decoder import DecoderConfig

Floats = NDArray[np.float64]


def heads_per_rank(shape: DecoderConfig, tp: ArrayLike) -> tuple[Floats, Floats]:
    """(query heads, kv heads) on the fullest rank; kv heads are replicated when tp exceeds them."""
    ranks = np.asarray(tp, dtype=np.float64)
    kv = np.ceil(shape.num_kv_heads / ranks)
    group = shape.num_heads / shape.num_kv_heads
    query = np.where(ranks > shape.num_kv_heads, np.ceil(shape.num_heads / ranks), kv * group)
    return np.asarray(query), np.asarray(kv)


def layer_parameters(shape: DecoderConfig, tp: ArrayLike, ep: ArrayLike = 1.0) -> Floats:
    """Weights of one layer on the fullest rank."""
    query, kv = heads_per_rank(shape, tp)
    h, d = shape.hidden_size, shape.head_dim
    bias = d * (query + 2 * kv) if shape.qkv_bias else 0.0
    router = 0 if shape.experts is None else h * shape.experts.num
    attention = h * d * (2 * query + 2 * kv) + bias + 2 * h + (2 * d if shape.qk_norm else 0)
    return np.asarray(attention + router + feed_forward_parameters(shape, tp, ep))


def feed_forward_parameters(shape: DecoderConfig, tp: ArrayLike, ep: ArrayLike = 1.0) -> Floats:
    """Weights of one layer's MLP on one rank, or of its experts, which ep divides."""
    width = np.ceil(shape.intermediate_size / np.asarray(tp, dtype=np.float64))
    count = 1.0 if shape.experts is None else shape.experts.num / np.asarray(ep, dtype=np.float64)
    return np.asarray(3 * shape.hidden_size * width * count)


def vocabulary_parameters(shape: DecoderConfig, tp: ArrayLike) -> Floats:
    """Weights of the embedding (or of an untied head) on one rank."""
    return np.asarray(shape.hidden_size * np.ceil(shape.vocab_size / np.asarray(tp, dtype=np.float64)))


def rank_parameters(shape: DecoderConfig, tp: ArrayLike, pp: ArrayLike, ep: ArrayLike = 1.0) -> Floats:
    """Weights on the fullest rank of an even split.

    The last stage takes the fewest layers and the head, the first the most layers and the embedding.
    """
    stages = np.asarray(pp, dtype=np.float64)
    layer, vocabulary = layer_parameters(shape, tp, ep), vocabulary_parameters(shape, tp)
    most, least = np.ceil(shape.num_layers / stages), np.floor(shape.num_layers / stages)
    head = vocabulary if shape.head == "lm" else np.zeros_like(vocabulary)
    own_head = np.zeros_like(head) if shape.tied and shape.head == "lm" else head
    alone = shape.num_layers * layer + vocabulary + own_head
    several = np.maximum(most * layer + vocabulary, least * layer + head)
    return np.asarray(np.where(stages == 1, alone, several) + shape.hidden_size)


def held_parameters(
    shape: DecoderConfig,
    tp: Floats,
    layers: ArrayLike,
    embedding: bool | NDArray[np.bool_],
    head: bool | NDArray[np.bool_],
    ep: ArrayLike = 1.0,
) -> Floats:
    """Weights on one rank of a pipeline stage with `layers` layers; `embedding` and `head` say if it holds
    them.
    """
    vocabulary = vocabulary_parameters(shape, tp)
    own_head = np.full_like(vocabulary, shape.hidden_size) if shape.head == "value" else vocabulary
    shared = np.logical_and(embedding, shape.tied and shape.head == "lm")
    return np.asarray(
        np.asarray(layers) * layer_parameters(shape, tp, ep)
        + np.where(embedding, vocabulary, 0.0)
        + np.where(np.logical_and(head, ~shared), own_head, 0.0)
    )


def stage_parameters(
    shape: DecoderConfig, tp: Floats, split: Sequence[int], index: int, ep: ArrayLike = 1.0
) -> Floats:
    """Weights on one rank of pipeline stage `index` of a split."""
    return held_parameters(shape, tp, split[index], index == 0, index == len(split) - 1, ep)


def adapter_parameters(shape: DecoderConfig, tp: ArrayLike) -> Floats:
    """Weights of the adapters of one layer on the fullest rank, 0 without adapters: `emu.lora` tells which
    factor is cut and which every rank holds whole.
    """
    if shape.lora is None:
        return np.zeros_like(np.asarray(tp, dtype=np.float64))
    query, kv = heads_per_rank(shape, tp)
    width = np.ceil(shape.intermediate_size / np.asarray(tp, dtype=np.float64))
    inside = {
        "q_proj": query * shape.head_dim,
        "k_proj": kv * shape.head_dim,
        "v_proj": kv * shape.head_dim,
        "o_proj": query * shape.head_dim,
        "gate_proj": width,
        "up_proj": width,
        "down_proj": width,
    }
    experts = ("gate_proj", "up_proj", "down_proj") if shape.experts is not None else ()  # not adapted
    adapted = [name for name in shape.lora.targets if name not in experts]
    return np.asarray(sum(shape.lora.rank * (shape.hidden_size + inside[name]) for name in adapted))


def trained_parameters(
    shape: DecoderConfig,
    tp: Floats,
    layers: ArrayLike,
    embedding: bool | NDArray[np.bool_],
    head: bool | NDArray[np.bool_],
    ep: ArrayLike = 1.0,
) -> Floats:
    """Weights with gradients and optimizer state on one rank of a pipeline stage: all that it holds, or the
    adapters and a value head.
    """
    if shape.lora is None:
        return held_parameters(shape, tp, layers, embedding, head, ep)
    value_head = np.where(head, shape.hidden_size if shape.head == "value" else 0.0, 0.0)
    return np.asarray(np.asarray(layers) * adapter_parameters(shape, tp) + value_head)


def total_parameters(shape: DecoderConfig) -> float:
    """Weights of the whole decoder, without replication."""
    return float(rank_parameters(shape, 1, 1))


def kv_bytes_per_token(
    shape: DecoderConfig, tp: ArrayLike, pp: ArrayLike, element_bytes: float = 2
) -> Floats:
    """Bytes of keys and values of one token on the fullest rank."""
    _, kv = heads_per_rank(shape, tp)
    return np.asarray(2 * element_bytes * kv * shape.head_dim * np.ceil(shape.num_layers / np.asarray(pp)))
