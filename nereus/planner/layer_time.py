"""The time of one decoder layer's forward pass on one rank, by the terms that calibration scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import Calibration
from nereus.planner.collective_time import all_reduce_s
from nereus.planner.kernel_time import elementwise_s, gemm_s
from nereus.planner.profile import ClusterProfile
from nereus.planner.shard_size import heads_per_rank

Floats = NDArray[np.float64]

_SMALL_KERNELS = (
    6  # two norms, rope, cache write, activation, residual: fused by every engine to about this many
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTime:
    """Seconds of one layer by term, every array of the same shape; attention is priced by its caller."""

    gemm: Floats
    elementwise: Floats
    tensor_parallel: Floats

    @property
    def total(self) -> Floats:
        """All terms together."""
        return np.asarray(self.gemm + self.elementwise + self.tensor_parallel)


def layer_forward(
    shape: DecoderConfig,
    tokens: ArrayLike,
    tp: ArrayLike,
    *,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration,
    element_bytes: float = 2,
) -> LayerTime:
    """One layer over `tokens` tokens (broadcast with `tp`), without attention over the context."""
    gpu = cluster.pool(gpu_kind).gpu
    m, ranks = np.broadcast_arrays(np.asarray(tokens, dtype=np.float64), np.asarray(tp, dtype=np.float64))
    query, kv = heads_per_rank(shape, ranks)
    h, d, f = shape.hidden_size, shape.head_dim, np.ceil(shape.intermediate_size / ranks)
    gemm = (
        gemm_s(gpu, m, (query + 2 * kv) * d, h)
        + gemm_s(gpu, m, h, query * d)
        + gemm_s(gpu, m, 2 * f, h)
        + gemm_s(gpu, m, h, f)
    )
    # Norms and residuals read and write the hidden state, rope the heads, the activation gate, up and its
    # result.
    moved = element_bytes * m * (8 * h + 2 * (query + 2 * kv) * d + 3 * f)
    up, out = all_reduce_s(cluster, gpu_kind, element_bytes * m * h, ranks, 1)
    return LayerTime(
        gemm=gemm * calibration.gemm,
        elementwise=elementwise_s(gpu, moved, _SMALL_KERNELS) * calibration.elementwise,
        tensor_parallel=2 * (up * calibration.scale_up + out * calibration.scale_out),
    )


def head_forward(
    shape: DecoderConfig,
    tokens: ArrayLike,
    tp: ArrayLike,
    *,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration,
) -> Floats:
    """The vocabulary head and the pass over its fp32 logits; a scalar head costs nothing."""
    m, ranks = np.broadcast_arrays(np.asarray(tokens, dtype=np.float64), np.asarray(tp, dtype=np.float64))
    if shape.head == "value":
        return np.zeros_like(m)
    gpu = cluster.pool(gpu_kind).gpu
    columns = np.ceil(shape.vocab_size / ranks)
    product = gemm_s(gpu, m, columns, shape.hidden_size) * calibration.gemm
    return np.asarray(product + elementwise_s(gpu, 10 * m * columns, 2) * calibration.elementwise)
