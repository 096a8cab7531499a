"""The time of scoring and of training: micro-batches through a pipeline, then gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nereus.planner.candidates import distinct
from nereus.planner.collective_time import all_reduce_s, point_to_point_s
from nereus.planner.decode_time import hop_s
from nereus.planner.kernel_time import context_attention_s, elementwise_s, score_passes_s
from nereus.planner.layer_time import Place, head_forward, layer_forward
from nereus.planner.profile import LinkClass
from nereus.planner.shard_size import (
    feed_forward_parameters,
    heads_per_rank,
    rank_parameters,
    trained_parameters,
)
from nereus.planner.workload import Recompute, Workload

Floats = NDArray[np.float64]

# Backward costs two products for each forward one; attention's backward 2.5: it computes the scores again.
BACKWARD_GEMM, BACKWARD_ATTENTION = 2.0, 2.5
# Communication and compute slow each other down by this factor while they overlap (Galvatron, A100).
OVERLAP_SLOWDOWN = 1.1256
# fp32 master and two moments read and written, gradient read, 16-bit weight written.
OPTIMIZER_BYTES = 3 * 8 + 4 + 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One micro-batch through one layer, the head and the hop between stages: seconds, shape [n]."""

    terms: dict[str, Floats]
    head: Floats
    hop: Floats

    @property
    def total(self) -> Floats:
        return np.asarray(sum(self.terms.values()))

    def trained(self, recompute: Recompute, *, frozen: bool) -> _Layer:
        """Forward and backward pass, with what is computed again. Frozen weights have no gradient, which is
        half of the backward products; those of adapters are too thin to count.
        """
        backward = BACKWARD_GEMM / 2 if frozen else BACKWARD_GEMM
        full = 1.0 if recompute is Recompute.FULL else 0.0
        scores = 0.0 if recompute is Recompute.NONE else 1.0
        factor = {
            "gemm": 1 + backward + full,
            "attention": 1 + BACKWARD_ATTENTION + scores,
            "elementwise": 3 + full,
            "tensor_parallel": 2 + full,
            "expert_parallel": 2 + full,
            # Keys and values go round again, with their gradients in twice as many bytes.
            "context_parallel": 4 + full,
            "host": 3 + full,
        }
        return _Layer(
            terms={name: term * factor[name] for name, term in self.terms.items()},
            head=self.head * (1 + backward),
            hop=2 * self.hop,
        )


def inference_terms(
    place: Place,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    ep: Floats | float = 1.0,
    cp: Floats | float = 1.0,
    *,
    split: Sequence[int] | None = None,
) -> dict[str, Floats]:
    """Seconds by term to score all sequences once, shape [n]; `split` as for training."""
    place = replace(place, calibration=place.calibration.in_scoring)
    share = np.ceil(workload.num_sequences / dp)
    micro = np.minimum(workload.micro_batch, share)
    layer = _forward(place, workload, tp, pp, ep, cp, micro)
    terms = _pipeline(place, layer, pp, np.ceil(share / micro), split)
    return {name: term * place.calibration.inference for name, term in terms.items()}


def training_terms(
    place: Place,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    ep: Floats | float = 1.0,
    cp: Floats | float = 1.0,
    *,
    split: Sequence[int] | None = None,
) -> dict[str, Floats]:
    """Seconds by term to train on all sequences `num_epochs` times, shape [n].

    `split` gives the layers of every pipeline stage for candidates that share one pp; None is the even split.
    """
    place = replace(place, calibration=place.calibration.in_training)
    steps = workload.num_mini_batches * workload.num_epochs
    share = np.ceil(workload.num_sequences / workload.num_mini_batches / dp)
    micro = np.minimum(workload.micro_batch, share)
    forward = _forward(place, workload, tp, pp, ep, cp, micro)
    layer = forward.trained(workload.recompute, frozen=place.shape.lora is not None)
    pipeline = _pipeline(place, layer, pp, np.ceil(share / micro), split)
    terms = {name: steps * term for name, term in pipeline.items()}
    # The last micro-batch's backward pass in one stage hides the exchange of gradients.
    backward = np.ceil(place.shape.num_layers / pp) * (layer.total - forward.total)
    parameters = rank_parameters(place.shape, tp, pp, ep)
    if place.shape.lora is not None:
        parameters = trained_parameters(place.shape, tp, np.ceil(place.shape.num_layers / pp), True, True)
    gradients = _gradients(place, workload, tp, pp, dp, ep, cp, parameters)
    terms["data_parallel"] = steps * exposed_s(gradients, backward)
    update = elementwise_s(place.gpu, parameters * OPTIMIZER_BYTES, 4)
    terms["optimizer"] = steps * update * place.calibration.optimizer
    return {name: term * place.calibration.training for name, term in terms.items()}


def exposed_s(communication: Floats, compute: Floats) -> Floats:
    """What communication adds to compute that it overlaps with, both slowed down while they do."""
    together = OVERLAP_SLOWDOWN * np.minimum(communication, compute) + np.abs(communication - compute)
    return np.asarray(np.where(communication > 0, together - compute, 0.0)).clip(min=0.0)


def _forward(
    place: Place,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    ep: Floats | float,
    cp: Floats | float,
    sequences: Floats,
) -> _Layer:
    """A forward pass of a micro-batch; only (tp, ep, cp, sequences) decide, so equal ones are priced once.

    Rows of a micro-batch are dealt over ep, tokens of each row divided over cp.
    """
    ep, cp = np.broadcast_to(ep, tp.shape), np.broadcast_to(cp, tp.shape)
    (ranks, experts, ring, count), back = distinct(tp, ep, cp, np.ceil(sequences / ep))
    response, prompt = workload.response, workload.prompt_tokens
    tokens = count * workload.sequence_tokens / ring
    one = layer_forward(place, tokens, ranks, experts)
    query, kv = heads_per_rank(place.shape, ranks)
    # Attention's work grows with the squared length; this length gives the batch its true sum of squares.
    length = np.sqrt(prompt**2 + 2 * prompt * response.mean + response.mean_square)
    weight = place.calibration.correction
    attention = context_attention_s(place.gpu, count, length, query, kv, place.shape.head_dim, weight=weight)
    if moved_bytes := workload.attention.moved_bytes:
        attention = attention + score_passes_s(place.gpu, count, length, query, moved_bytes=moved_bytes)
    attention = attention * place.calibration.context_attention / ring
    head = head_forward(place, count * response.mean / ring, ranks)
    return _Layer(
        terms={
            "gemm": one.gemm[back],
            "attention": attention[back],
            "elementwise": one.elementwise[back],
            "tensor_parallel": one.tensor_parallel[back],
            "expert_parallel": one.expert_parallel[back],
            "context_parallel": _ring_s(place, tokens, ranks, experts, ring, attention)[back],
            "host": np.full_like(tp, place.calibration.layer_s),
        },
        head=head[back],
        hop=hop_s(place, tp * ep * cp, pp, tokens[back]) + np.where(pp > 1, place.calibration.hop_s, 0.0),
    )


def _ring_s(place: Place, tokens: Floats, tp: Floats, ep: Floats, cp: Floats, attention: Floats) -> Floats:
    """What is left of sending keys and values round the ring, beside the attention of each of its steps."""
    _, kv = heads_per_rank(place.shape, tp)
    size = place.precision.activation_bytes * 2 * kv * place.shape.head_dim * tokens
    up, out = (
        point_to_point_s(place.cluster, place.gpu_kind, size, link) * gain
        for link, gain in (
            (LinkClass.SCALE_UP, place.calibration.scale_up),
            (LinkClass.SCALE_OUT, place.calibration.scale_out),
        )
    )
    hop = np.where(tp * ep * cp <= place.gpus_per_node, up, out)  # all wait for the slowest link
    return np.asarray((cp - 1) * np.maximum(hop - attention / cp, 0.0))


def _pipeline(
    place: Place, layer: _Layer, pp: Floats, rounds: Floats, split: Sequence[int] | None
) -> dict[str, Floats]:
    """Terms of `(rounds - 1) * slowest stage + sum of the stages`, which GPipe and 1F1B share.

    The even split puts the remainder first; the last stage carries the head.
    """
    layers = place.shape.num_layers
    once = layers * layer.total + layer.head
    if split is None:
        most, last = np.ceil(layers / pp), np.floor(layers / pp)
    else:
        most, last = np.full_like(pp, max(split)), np.full_like(pp, split[-1])
    slowest = np.maximum(most * layer.total, last * layer.total + layer.head)
    busy = rounds / pp  # how often a stage's average share of the model runs
    return {
        **{name: layers * term * busy for name, term in layer.terms.items()},
        "head": layer.head * busy,
        "bubble": (rounds - 1) * slowest + once - once * busy,
        "pipeline": (rounds + pp - 1) * layer.hop,
    }


def _gradients(
    place: Place,
    workload: Workload,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    ep: Floats | float,
    cp: Floats | float,
    parameters: Floats,
) -> Floats:
    """Seconds to add up the gradients of all units; and before, inside each, those of experts along cp and
    those of all other weights along ep and cp.
    """
    ep, cp = np.broadcast_to(ep, tp.shape), np.broadcast_to(cp, tp.shape)
    experts = np.zeros_like(tp)
    if place.shape.experts is not None and place.shape.lora is None:
        experts = np.ceil(place.shape.num_layers / pp) * feed_forward_parameters(place.shape, tp, ep)
    sums = (
        (parameters, dp, tp * pp * ep * cp),
        (parameters - experts, ep * cp, tp),
        (experts, cp, tp * ep),
    )
    total = np.zeros_like(tp)
    for count, ranks, stride in sums:
        size = workload.grad_bytes * np.maximum(count, 0.0)
        up, out = all_reduce_s(place.cluster, place.gpu_kind, size, ranks, stride.astype(np.int64))
        total = total + up * place.calibration.scale_up + out * place.calibration.scale_out
    return total
