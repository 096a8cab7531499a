"""The time of one decoder layer's forward pass on one rank, by the terms that calibration scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.collective_time import all_reduce_s
from nereus.planner.kernel_time import elementwise_s, gemm_s
from nereus.planner.profile import ClusterProfile, GpuProfile
from nereus.planner.shard_size import heads_per_rank

Floats = NDArray[np.float64]

_SMALL_KERNELS = (
    6  # two norms, rope, cache write, activation, residual: fused by every engine to about this many
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of a weight, of an activation and of a cached key or value; `speed` multiplies the 16-bit
    peak.
    """

    weight_bytes: float = 2
    activation_bytes: float = 2
    cache_bytes: float = 2
    speed: float = 1


BF16 = Precision()
FP32 = Precision(weight_bytes=4, activation_bytes=4, cache_bytes=4, speed=0.5)
FP8 = Precision(weight_bytes=1, activation_bytes=2, cache_bytes=1, speed=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model-stage would run: everything its times depend on besides its sizes and its work."""

    shape: DecoderConfig
    cluster: ClusterProfile
    gpu_kind: str
    calibration: Calibration = NEUTRAL
    precision: Precision = BF16

    @property
    def gpu(self) -> GpuProfile:
        """The GPU kind's profile."""
        return self.cluster.pool(self.gpu_kind).gpu

    @property
    def gpus_per_node(self) -> int:
        """GPUs that share a node."""
        return self.cluster.pool(self.gpu_kind).gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTime:
    """Seconds of one layer by term, every array of the same shape; attention is priced by its caller."""

    gemm: Floats
    elementwise: Floats
    tensor_parallel: Floats


def layer_forward(place: Place, tokens: ArrayLike, tp: ArrayLike, *, captured: bool = False) -> LayerTime:
    """One layer over `tokens` tokens (broadcast with `tp`), without attention over the context.

    `captured`: the layer runs inside a captured graph, as a decode step does.
    """
    shape, precision, calibration = place.shape, place.precision, place.calibration
    m, ranks = np.broadcast_arrays(np.asarray(tokens, dtype=np.float64), np.asarray(tp, dtype=np.float64))
    query, kv = heads_per_rank(shape, ranks)
    h, d, f = shape.hidden_size, shape.head_dim, np.ceil(shape.intermediate_size / ranks)

    # The four products of a layer (qkv, attention out, gate and up, down), priced in one call.
    wide, narrow = np.full_like(m, h), query * d
    products = gemm_s(
        place.gpu,
        m,
        np.stack([(query + 2 * kv) * d, wide, 2 * f, wide]),
        np.stack([wide, narrow, wide, f]),
        element_bytes=precision.weight_bytes,
        speed=precision.speed,
        weight=calibration.correction,
    )
    gemm = products.sum(axis=0)
    # Norms and residuals read and write the hidden state, rope the heads, the activation gate, up and result.
    moved = precision.activation_bytes * m * (8 * h + 2 * (query + 2 * kv) * d + 3 * f)
    size = precision.activation_bytes * m * h
    up, out = all_reduce_s(place.cluster, place.gpu_kind, size, ranks, 1, captured=captured)
    return LayerTime(
        gemm=gemm * calibration.gemm,
        elementwise=elementwise_s(place.gpu, moved, _SMALL_KERNELS) * calibration.elementwise,
        tensor_parallel=2 * (up * calibration.scale_up + out * calibration.scale_out),
    )


def head_forward(place: Place, tokens: ArrayLike, tp: ArrayLike) -> Floats:
    """The vocabulary head and the pass over its fp32 logits; a scalar head costs nothing."""
    m, ranks = np.broadcast_arrays(np.asarray(tokens, dtype=np.float64), np.asarray(tp, dtype=np.float64))
    if place.shape.head == "value":
        return np.zeros_like(m)
    columns = np.ceil(place.shape.vocab_size / ranks)
    product = gemm_s(
        place.gpu,
        m,
        columns,
        place.shape.hidden_size,
        element_bytes=max(place.precision.weight_bytes, 2),  # engines with 8-bit weights keep a 16-bit head
        speed=min(place.precision.speed, 1),
        weight=place.calibration.correction,
    )
    product = product * place.calibration.gemm
    return np.asarray(product + elementwise_s(place.gpu, 10 * m * columns, 2) * place.calibration.elementwise)
