"""The time of one decode step and of a prefill on one unit: what an inference engine's TPOT and TTFT are
made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.planner.collective_time import point_to_point_s
from nereus.planner.kernel_time import context_attention_s, decode_attention_s
from nereus.planner.layer_time import Place, head_forward, layer_forward
from nereus.planner.profile import LinkClass
from nereus.planner.shard_size import heads_per_rank

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_POINTS_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeTable:
    """Seconds of the parts of a decode step, on a logarithmic grid of batch sizes for every tp (and ep).

    `layer` and `head` are [tp, batch]; `attention` is [context, tp, batch]; all of them for the whole model,
    not for one pipeline stage. A lookup costs two gathers, whatever the number of candidates.
    """

    layer: Floats
    tensor_parallel: Floats
    expert_parallel: Floats
    head: Floats
    attention: Floats

    @staticmethod
    def at(batch: Floats) -> tuple[Ints, Floats]:
        """(lower knot, share of the upper one) of batch sizes of at least 1."""
        position = np.log2(np.maximum(batch, 1.0)) * _POINTS_PER_OCTAVE
        low = position.astype(np.intp)
        return low, position - low


def decode_table(
    place: Place, tp: Floats, largest_batch: float, contexts: Floats, ep: Floats | None = None
) -> DecodeTable:
    """Price the grid: `tp` [tp] distinct sizes (with `ep` [tp] distinct pairs), batches 1 to
    `largest_batch`, `contexts` [context] cached tokens.
    """
    count = int(np.ceil(np.log2(max(largest_batch, 2.0)) * _POINTS_PER_OCTAVE)) + 2
    batch = 2.0 ** (np.arange(count) / _POINTS_PER_OCTAVE)
    grid = (batch[None, :], tp[:, None])
    experts = 1.0 if ep is None else ep[:, None]
    one = layer_forward(place, *grid, experts, captured=True)
    layers = place.shape.num_layers
    return DecodeTable(
        layer=layers * (one.gemm + one.elementwise),
        tensor_parallel=layers * one.tensor_parallel,
        expert_parallel=layers * one.expert_parallel,
        head=head_forward(place, *grid),
        attention=layers
        * attention_s(place, batch[None, None, :], contexts[:, None, None], tp[None, :, None]),
    )


def attention_s(place: Place, batch: ArrayLike, context: ArrayLike, tp: ArrayLike) -> Floats:
    """Seconds of one layer's attention of one new token a sequence; arguments broadcast."""
    query, kv = heads_per_rank(place.shape, tp)
    time = decode_attention_s(
        place.gpu,
        batch,
        context,
        query,
        kv,
        place.shape.head_dim,
        element_bytes=place.precision.cache_bytes,
        weight=place.calibration.correction,
    )
    return time * place.calibration.decode_attention


def decode_step_terms(place: Place, batch: ArrayLike, context: ArrayLike, tp: ArrayLike) -> dict[str, Floats]:
    """Seconds by term of one token for `batch` sequences of `context` cached tokens on one unit without
    pipeline.
    """
    one = layer_forward(place, batch, tp, captured=True)
    layers = place.shape.num_layers
    return {
        "weights": layers * (one.gemm + one.elementwise),
        "tensor_parallel": layers * one.tensor_parallel,
        "attention": layers * attention_s(place, batch, context, tp),
        "head": head_forward(place, batch, tp),
        "host": np.full(np.broadcast(batch, tp).shape, place.calibration.decode_step_s),
    }


def prefill_layer_s(
    place: Place, sequences: ArrayLike, prompt_tokens: ArrayLike, tp: ArrayLike, ep: ArrayLike = 1.0
) -> Floats:
    """Seconds of one layer over `sequences` prompts at once (a fraction of one: a chunk of its prompt)."""
    count, prompt, ranks, experts = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (sequences, prompt_tokens, tp, ep))
    )
    one = layer_forward(place, count * prompt, ranks, experts, same_tokens=True)
    query, kv = heads_per_rank(place.shape, ranks)
    weight = place.calibration.correction
    attention = context_attention_s(place.gpu, count, prompt, query, kv, place.shape.head_dim, weight=weight)
    attention = attention * place.calibration.context_attention
    return np.asarray(one.gemm + one.elementwise + one.tensor_parallel + one.expert_parallel + attention)


def hop_s(place: Place, tp: Floats, pp: Floats, tokens: Floats) -> Floats:
    """Seconds to hand `tokens` hidden states to the next stage; across nodes once the unit leaves its
    node.
    """
    size = place.precision.activation_bytes * tokens * place.shape.hidden_size
    near = (
        point_to_point_s(place.cluster, place.gpu_kind, size, LinkClass.SCALE_UP) * place.calibration.scale_up
    )
    far = (
        point_to_point_s(place.cluster, place.gpu_kind, size, LinkClass.SCALE_OUT)
        * place.calibration.scale_out
    )
    return np.asarray(np.where(pp > 1, np.where(tp * pp <= place.gpus_per_node, near, far), 0.0))
