"""Bytes on the fullest GPU of a model-stage, by term, and which term breaks the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.candidates import as_candidates
from nereus.planner.profile import ClusterProfile
from nereus.planner.shard_size import heads_per_rank, kv_bytes_per_token, rank_parameters
from nereus.planner.workload import ModelStage, Recompute, Stage, Workload

Floats = NDArray[np.float64]

MARGIN = 0.10  # of the device's memory: fragmentation and what no formula sees
_CONTEXT_BYTES = 0.5e9  # driver context and library workspaces, once a process
_GROUP_BYTES = 0.35e9  # buffers of one set of communicators
_GRAPH_BYTES = 1.0e9  # captured decode graphs
_KV_TAIL = 0.99  # residency is sized for this quantile of the batch's total


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one model-stage on its fullest GPU.

    `persistent_bytes` stay while other stages run on the same GPU (weights, optimizer state);
    `transient_bytes` exist only while this stage runs. `terms` sum to both together.
    """

    persistent_bytes: int
    transient_bytes: int
    terms: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Both parts."""
        return self.persistent_bytes + self.transient_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemories:
    """`StageMemory` of many candidates, arrays of their shape."""

    persistent_bytes: Floats
    transient_bytes: Floats
    terms: Mapping[str, Floats]

    def at(self, index: int) -> StageMemory:
        """One candidate's memory."""
        return StageMemory(
            persistent_bytes=int(self.persistent_bytes[index]),
            transient_bytes=int(self.transient_bytes[index]),
            terms={name: int(term[index]) for name, term in self.terms.items()},
        )


_PERSISTENT = ("weights", "gradients", "master", "moments")


def stage_memories(
    model_stage: ModelStage,
    tp: ArrayLike,
    pp: ArrayLike,
    dp: ArrayLike,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
) -> StageMemories:
    """Memory of a model-stage for arrays of (tp, pp, dp); they broadcast to one dimension."""
    sizes = as_candidates(tp, pp, dp)
    cluster.pool(gpu_kind)  # a stranger is an error, though no term depends on the kind
    shape = workload.shape(model_stage)
    if model_stage.stage is Stage.GENERATION:
        terms = _generation(shape, workload, *sizes)
    elif model_stage.stage is Stage.INFERENCE:
        terms = _inference(shape, workload, *sizes)
    else:
        terms = training_bytes(shape, workload, *sizes)
    kept = np.asarray(sum(terms[name] for name in _PERSISTENT if name in terms))
    return StageMemories(
        persistent_bytes=kept, transient_bytes=np.asarray(sum(terms.values())) - kept, terms=terms
    )


def stage_memory(
    model_stage: ModelStage,
    tp: int,
    pp: int,
    dp: int,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
) -> StageMemory:
    """Memory of a model-stage with `dp` units of layout (tp, pp)."""
    return stage_memories(model_stage, tp, pp, dp, workload=workload, cluster=cluster, gpu_kind=gpu_kind).at(
        0
    )


def usable_bytes(cluster: ClusterProfile, gpu_kind: str) -> int:
    """What a plan may use of one GPU: its memory less the margin."""
    return int(cluster.pool(gpu_kind).gpu.memory_bytes * (1 - MARGIN))


def _generation(
    shape: DecoderConfig, workload: Workload, tp: Floats, pp: Floats, dp: Floats
) -> dict[str, Floats]:
    per_unit = np.ceil(workload.num_generated / dp)
    resident = np.minimum(per_unit, np.inf if workload.max_resident is None else workload.max_resident)
    tokens = resident_tokens(workload, resident)
    one = np.ones_like(tp)
    return {
        "weights": workload.dtype_bytes * rank_parameters(shape, tp, pp),
        "kv_cache": kv_bytes_per_token(shape, tp, pp, workload.dtype_bytes) * tokens,
        "activations": one
        * workload.dtype_bytes
        * 8192
        * (4 * shape.hidden_size + 3 * shape.intermediate_size / tp),
        "logits": 4 * np.minimum(resident, 1024) * np.ceil(shape.vocab_size / tp) * 2,
        "graphs": one * _GRAPH_BYTES,
        "communication": _groups(tp, pp, one),
        "context": one * _CONTEXT_BYTES,
    }


def resident_tokens(workload: Workload, resident: ArrayLike) -> Floats:
    """Tokens of KV cache that `resident` sequences need at their worst moment, at the 99 % quantile.

    While nobody has finished each holds prompt + position; the total peaks where n * S(u) * (prompt + u)
    does.
    """
    count = np.asarray(resident, dtype=np.float64)
    response, prompt = workload.response, workload.prompt_tokens
    grid = np.linspace(0.0, response.maximum, 257)
    fresh = float((response.survival(grid) * (prompt + grid)).max())
    # A continuously refilled engine holds prompt + age instead; take the worse of the two moments.
    age = response.mean_square / (2 * response.mean)
    mean = max(fresh, prompt + age)
    spread = np.sqrt(np.maximum(response.mean_square - response.mean**2, 0.0))
    return np.asarray(
        np.minimum(count * mean + 2.33 * np.sqrt(count) * spread, count * (prompt + response.maximum))
    )


def _inference(
    shape: DecoderConfig, workload: Workload, tp: Floats, pp: Floats, dp: Floats
) -> dict[str, Floats]:
    one = np.ones_like(tp)
    sequences = np.minimum(workload.micro_batch, np.ceil(workload.num_sequences / dp))
    tokens = sequences * workload.max_sequence_tokens
    return {
        "weights": workload.dtype_bytes * rank_parameters(shape, tp, pp),
        "activations": tokens * _live_layer_bytes(shape, tp, workload),
        "logits": _logits(shape, tp, tokens, workload, copies=2),
        "communication": _groups(tp, pp, one),
        "context": one * _CONTEXT_BYTES,
    }


def training_bytes(
    shape: DecoderConfig, workload: Workload, tp: Floats, pp: Floats, dp: Floats
) -> dict[str, Floats]:
    one = np.ones_like(tp)
    share = np.ceil(workload.num_sequences / workload.num_mini_batches / dp)
    sequences = np.minimum(workload.micro_batch, share)
    tokens = sequences * workload.max_sequence_tokens
    parameters = rank_parameters(shape, tp, pp)
    in_flight = np.minimum(pp, np.ceil(share / sequences))  # 1F1B: stage 0 holds p micro-batches
    layers = np.ceil(shape.num_layers / pp)
    per_layer = saved_bytes_per_token(shape, tp, workload)
    return {
        "weights": workload.dtype_bytes * parameters,
        "gradients": workload.grad_bytes * parameters,
        "master": 4 * parameters,
        "moments": 8 * parameters,
        "activations": tokens * (per_layer * layers * in_flight + _live_layer_bytes(shape, tp, workload)),
        "logits": _logits(shape, tp, tokens, workload, copies=3),
        "communication": _groups(tp, pp, np.where(dp > 1, 2.0, 1.0)),
        "context": one * _CONTEXT_BYTES,
    }


def saved_bytes_per_token(shape: DecoderConfig, tp: Floats, workload: Workload) -> Floats:
    """Bytes that one layer keeps for its backward pass for each token, on one rank."""
    size = workload.dtype_bytes
    if workload.recompute is Recompute.FULL:
        return np.asarray(size * shape.hidden_size * np.ones_like(tp))
    return _live_layer_bytes(shape, tp, workload)


def _live_layer_bytes(shape: DecoderConfig, tp: Floats, workload: Workload) -> Floats:
    """Bytes a token that one layer's tensors take while all live.

    Hidden-sized tensors are not cut by tensor parallelism (no sequence parallelism): input, two norms,
    the residual.
    """
    query, kv = heads_per_rank(shape, tp)
    hidden, heads = 4.0 * shape.hidden_size, (2 * query + 2 * kv) * shape.head_dim
    return np.asarray(workload.dtype_bytes * (hidden + heads + 4 * np.ceil(shape.intermediate_size / tp)))


def _logits(shape: DecoderConfig, tp: Floats, tokens: Floats, workload: Workload, *, copies: int) -> Floats:
    """fp32 logits of one chunk, `copies` of them alive at once."""
    if shape.head == "value":
        return np.zeros_like(tp)
    chunk = np.inf if workload.logits_chunk_tokens is None else workload.logits_chunk_tokens
    return np.asarray(4.0 * copies * np.minimum(tokens, chunk) * np.ceil(shape.vocab_size / tp))


def _groups(tp: Floats, pp: Floats, extra: Floats) -> Floats:
    return np.asarray(_GROUP_BYTES * ((tp > 1) * 1.0 + (pp > 1) * 1.0 + extra))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Whether the model-stages of one GPU fit; `breaks` names the largest "model-stage term"."""

    needed_bytes: int
    usable_bytes: int
    breaks: str | None

    @property
    def fits(self) -> bool:
        """True where the need is within the limit."""
        return self.needed_bytes <= self.usable_bytes


def co_resident(memories: Mapping[ModelStage, StageMemory], usable: int) -> MemoryVerdict:
    """Model-stages that share a GPU: all persistent parts stay, the largest transient part comes on top."""
    persistent = sum(memory.persistent_bytes for memory in memories.values())
    peak = max(memories, key=lambda name: memories[name].transient_bytes)
    needed = persistent + memories[peak].transient_bytes
    if needed <= usable:
        return MemoryVerdict(needed_bytes=needed, usable_bytes=usable, breaks=None)
    shares = {
        (name, term): size
        for name, memory in memories.items()
        for term, size in memory.terms.items()
        if term in _PERSISTENT or name is peak
    }
    name, term = max(shares, key=lambda key: shares[key])
    return MemoryVerdict(needed_bytes=needed, usable_bytes=usable, breaks=f"{name} {term}")


def transition_peak(old_bytes: int, new_bytes: int, *, chunk_bytes: int | None = None) -> int:
    """Bytes at the worst moment of a transition: old and new shadows, or one shard and a chunk."""
    if chunk_bytes is None:
        return old_bytes + new_bytes
    return max(old_bytes, new_bytes) + chunk_bytes
