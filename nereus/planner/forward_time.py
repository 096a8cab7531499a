"""The time of scoring and of training: micro-batches through a pipeline, then gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import Calibration
from nereus.planner.collective_time import all_reduce_s, point_to_point_s
from nereus.planner.kernel_time import context_attention_s, elementwise_s
from nereus.planner.layer_time import head_forward, layer_forward
from nereus.planner.profile import ClusterProfile, LinkClass
from nereus.planner.shard_size import heads_per_rank, rank_parameters
from nereus.planner.workload import ModelStage, Recompute, Workload

Floats = NDArray[np.float64]

# Backward costs two products for each forward one; attention's backward 2.5 (it recomputes the scores
# once more).
_BACKWARD_GEMM, _BACKWARD_ATTENTION = 2.0, 2.5
# Communication and compute slow each other down by this factor while they overlap (measured on A100 by
# Galvatron).
_OVERLAP_SLOWDOWN = 1.1256
# fp32 master and two moments read and written, gradient read, 16-bit weight written.
_OPTIMIZER_BYTES = 3 * 8 + 4 + 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forward:
    """One micro-batch's forward pass of one layer and of the head, in seconds, shape [n]."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    tensor_parallel: Floats
    head: Floats
    hop: Floats


def inference_terms(
    model_stage: ModelStage,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration,
) -> dict[str, Floats]:
    """Seconds by term to score all sequences once, shape [n]."""
    place = _Place(workload.shape(model_stage), workload, cluster, gpu_kind, calibration)
    terms = place.pipeline(tp, pp, np.ceil(workload.num_sequences / dp), training=False)
    return {name: term * calibration.inference for name, term in terms.items()}


def training_terms(
    model_stage: ModelStage,
    tp: Floats,
    pp: Floats,
    dp: Floats,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration,
) -> dict[str, Floats]:
    """Seconds by term to train on all sequences `num_epochs` times, shape [n]."""
    place = _Place(workload.shape(model_stage), workload, cluster, gpu_kind, calibration)
    steps = workload.num_mini_batches * workload.num_epochs
    share = np.ceil(workload.num_sequences / workload.num_mini_batches / dp)
    terms = {name: term * steps for name, term in place.pipeline(tp, pp, share, training=True).items()}
    parameters = rank_parameters(place.shape, tp, pp)
    gradients, backward = place.gradients(tp, pp, dp, parameters), place.last_backward(tp, pp, share)
    # Overlapped with the last micro-batch's backward pass, both slowed down; what sticks out is exposed.
    overlapped = _OVERLAP_SLOWDOWN * np.minimum(gradients, backward) + np.abs(gradients - backward)
    terms["data_parallel"] = steps * np.where(dp > 1, np.maximum(overlapped - backward, 0.0), 0.0)
    update = (
        elementwise_s(cluster.pool(gpu_kind).gpu, parameters * _OPTIMIZER_BYTES, 4) * calibration.optimizer
    )
    terms["optimizer"] = steps * update
    if workload.old_logprobs and model_stage is ModelStage.ACTOR_TRAINING:
        scored = place.pipeline(tp, pp, np.ceil(workload.num_sequences / dp), training=False)
        terms["old_logprobs"] = np.asarray(sum(scored.values()))
    return {name: term * calibration.training for name, term in terms.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    shape: DecoderConfig
    workload: Workload
    cluster: ClusterProfile
    gpu_kind: str
    calibration: Calibration

    def forward(self, tp: Floats, pp: Floats, sequences: Floats) -> _Forward:
        """One micro-batch; only (tp, sequences) decide, so equal pairs are priced once."""
        keys, inverse = np.unique(np.stack((tp, sequences)), axis=1, return_inverse=True)
        back = inverse.ravel()
        ranks, count = keys
        cluster, kind, calibration = self.cluster, self.gpu_kind, self.calibration
        tokens = count * self.workload.sequence_tokens
        layer = layer_forward(
            self.shape, tokens, ranks, cluster=cluster, gpu_kind=kind, calibration=calibration
        )
        query, _ = heads_per_rank(self.shape, ranks)
        response, prompt = self.workload.response, self.workload.prompt_tokens
        square = count * (prompt**2 + 2 * prompt * response.mean + response.mean_square)
        attention = context_attention_s(cluster.pool(kind).gpu, square, query, self.shape.head_dim)
        head = head_forward(
            self.shape, count * response.mean, ranks, cluster=cluster, gpu_kind=kind, calibration=calibration
        )
        size = self.workload.dtype_bytes * tokens * self.shape.hidden_size
        near = point_to_point_s(cluster, kind, size, LinkClass.SCALE_UP)[back] * calibration.scale_up
        far = point_to_point_s(cluster, kind, size, LinkClass.SCALE_OUT)[back] * calibration.scale_out
        hop = np.where(pp > 1, np.where(tp * pp <= cluster.pool(kind).gpus_per_node, near, far), 0.0)
        return _Forward(
            gemm=layer.gemm[back],
            attention=attention[back] * calibration.context_attention,
            elementwise=layer.elementwise[back],
            tensor_parallel=layer.tensor_parallel[back],
            head=head[back],
            hop=hop,
        )

    def pipeline(self, tp: Floats, pp: Floats, sequences: Floats, *, training: bool) -> dict[str, Floats]:
        """(m - 1) * slowest stage + sum of the stages: the same for GPipe and 1F1B."""
        micro = np.minimum(self.workload.micro_batch, sequences)
        rounds = np.ceil(sequences / micro)
        forward = self.forward(tp, pp, micro)
        again = 1.0 if self.workload.recompute is Recompute.FULL and training else 0.0
        recompute_attention = 1.0 if self.workload.recompute is not Recompute.NONE and training else 0.0
        back = 1.0 if training else 0.0
        layer = {
            "gemm": forward.gemm * (1 + _BACKWARD_GEMM * back + again),
            "attention": forward.attention * (1 + _BACKWARD_ATTENTION * back + recompute_attention),
            "elementwise": forward.elementwise * (1 + 2 * back + again),
            "tensor_parallel": forward.tensor_parallel * (1 + back + again),
        }
        head = forward.head * (1 + _BACKWARD_GEMM * back)
        one = np.asarray(sum(layer.values()))
        most, least = np.ceil(self.shape.num_layers / pp), np.floor(self.shape.num_layers / pp)
        slowest = np.maximum(most * one, least * one + head)
        hop = forward.hop * (1 + back)
        total = rounds * (self.shape.num_layers * one + head)  # as if one stage did all
        waits = (rounds - 1) * slowest + self.shape.num_layers * one + head
        scale = rounds / pp  # share of every term that a stage works for
        busy = total / pp
        return {
            **{name: self.shape.num_layers * term * scale for name, term in layer.items()},
            "head": head * scale,
            "bubble": waits - busy,
            "pipeline": (rounds + pp - 1) * hop,
        }

    def last_backward(self, tp: Floats, pp: Floats, sequences: Floats) -> Floats:
        """Seconds of one micro-batch's backward pass in one stage; gradient exchange hides behind it."""
        forward = self.forward(tp, pp, np.minimum(self.workload.micro_batch, sequences))
        one = (
            _BACKWARD_GEMM * forward.gemm + _BACKWARD_ATTENTION * forward.attention + 2 * forward.elementwise
        )
        return np.asarray(np.ceil(self.shape.num_layers / pp) * one)

    def gradients(self, tp: Floats, pp: Floats, dp: Floats, parameters: Floats) -> Floats:
        """Seconds to add up the gradients of all units."""
        up, out = all_reduce_s(
            self.cluster, self.gpu_kind, self.workload.grad_bytes * parameters, dp, (tp * pp).astype(np.int64)
        )
        return np.asarray(up * self.calibration.scale_up + out * self.calibration.scale_out)
