"""The time of one decoder layer's forward pass on one rank, by the terms that calibration scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.collective_time import all_reduce_s, all_to_all_s
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
    expert_parallel: Floats


def layer_forward(
    place: Place,
    tokens: ArrayLike,
    tp: ArrayLike,
    ep: ArrayLike = 1.0,
    *,
    captured: bool = False,
    same_tokens: bool | None = None,
) -> LayerTime:
    """One layer over `tokens` tokens of a rank (broadcast with `tp` and `ep`), without attention over the
    context.

    `captured`: the layer runs inside a captured graph, as a decode step does. `same_tokens`: the ranks along
    ep have the same tokens, as in generation (so by default where captured), else tokens of their own.
    """
    same_tokens = captured if same_tokens is None else same_tokens
    shape, precision, calibration = place.shape, place.precision, place.calibration
    m, ranks, experts = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (tokens, tp, ep))
    )
    query, kv = heads_per_rank(shape, ranks)
    h, d, f = shape.hidden_size, shape.head_dim, np.ceil(shape.intermediate_size / ranks)
    visits = _visits(place, m, experts, same_tokens=same_tokens)

    # The four products of a layer (qkv, attention out, gate and up, down), priced in one call.
    wide, narrow = np.full_like(m, h), query * d
    products = gemm_s(
        place.gpu,
        np.stack([m, m, visits.rows, visits.rows]),
        np.stack([(query + 2 * kv) * d, wide, 2 * f, wide]),
        np.stack([wide, narrow, wide, f]),
        element_bytes=precision.weight_bytes,
        speed=precision.speed,
        weight=calibration.correction,
    )
    gemm = products[0] + products[1] + visits.experts * (products[2] + products[3])
    # Norms and residuals read and write the hidden state, rope the heads, the activation gate, up and result;
    # a visit's input and output are copied once more, and weighed.
    moved = m * (8 * h + 2 * (query + 2 * kv) * d) + visits.total * 3 * f
    if shape.experts is not None:
        moved = moved + visits.total * 5 * h
    size = precision.activation_bytes * m * h
    up, out = all_reduce_s(place.cluster, place.gpu_kind, size, ranks, 1, captured=captured)
    return LayerTime(
        gemm=gemm * calibration.gemm,
        elementwise=elementwise_s(place.gpu, precision.activation_bytes * moved, _SMALL_KERNELS)
        * calibration.elementwise,
        tensor_parallel=2 * (up * calibration.scale_up + out * calibration.scale_out),
        expert_parallel=_joining_s(place, m, ranks, experts, same_tokens=same_tokens, captured=captured),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Visits:
    """What the experts of one rank see in one layer: how many of them any token visits, rows of each of
    these, and rows of all. A dense layer is one expert that all tokens visit.
    """

    experts: Floats
    rows: Floats
    total: Floats


def _visits(place: Place, tokens: Floats, ep: Floats, *, same_tokens: bool) -> _Visits:
    """Tokens choose k of E experts evenly: n of them touch E (1 - (1 - k/E)^n)."""
    shape = place.shape.experts
    if shape is None:
        return _Visits(experts=np.ones_like(tokens), rows=tokens, total=tokens)
    everywhere = tokens if same_tokens else tokens * ep
    touched = shape.num / ep * -np.expm1(everywhere * np.log1p(-min(shape.per_token / shape.num, 1 - 1e-12)))
    total = everywhere * shape.per_token / ep
    experts = np.maximum(touched, np.minimum(total, 1.0))
    return _Visits(experts=experts, rows=np.maximum(total / experts, 1.0), total=total)


def _joining_s(
    place: Place, tokens: Floats, tp: Floats, ep: Floats, *, same_tokens: bool, captured: bool
) -> Floats:
    """Two all-to-alls of the visits, or the all-reduce that joins the outputs of ranks with equal tokens."""
    shape, calibration = place.shape.experts, place.calibration
    if shape is None or not (ep > 1).any():
        return np.zeros_like(tokens)
    size = place.precision.activation_bytes * tokens * place.shape.hidden_size
    if same_tokens:
        up, out = all_reduce_s(place.cluster, place.gpu_kind, size, ep, tp, captured=captured)
    else:
        up, out = all_to_all_s(place.cluster, place.gpu_kind, size * shape.per_token, ep, tp)
        up, out = 2 * up, 2 * out
    return np.asarray(up * calibration.scale_up + out * calibration.scale_out)


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
