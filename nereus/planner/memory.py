"""Whether model-stages fit on a GPU: bytes by term, the term that breaks the limit, the peak of a
transition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.planner.candidates import as_candidates
from nereus.planner.profile import ClusterProfile
from nereus.planner.shard_size import stage_parameters
from nereus.planner.stage_bytes import FIXED, PERSISTENT, generation_bytes, inference_bytes, training_bytes
from nereus.planner.workload import ModelStage, Stage, Workload

Floats = NDArray[np.float64]

MARGIN = 0.10  # of the device's memory: fragmentation and what no formula sees


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
        terms = {name: round(float(term[index])) for name, term in self.terms.items()}
        kept = sum(size for name, size in terms.items() if name in PERSISTENT)
        return StageMemory(persistent_bytes=kept, transient_bytes=sum(terms.values()) - kept, terms=terms)


def stage_memories(
    model_stage: ModelStage,
    tp: ArrayLike,
    pp: ArrayLike,
    dp: ArrayLike,
    ep: ArrayLike = 1.0,
    cp: ArrayLike = 1.0,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
) -> StageMemories:
    """Memory of a model-stage for arrays of (tp, pp, dp, ep, cp); they broadcast to one dimension.

    Raises ConfigError for a model the workload lacks or an unknown GPU kind.
    """
    sizes = as_candidates(tp, pp, dp, ep, cp)
    fixed_share = cluster.pool(gpu_kind).gpu.fixed_share
    shape = workload.shape(model_stage)
    if model_stage.stage is Stage.GENERATION:
        terms = generation_bytes(shape, workload, *sizes[:4])
    elif model_stage.stage is Stage.INFERENCE:
        terms = inference_bytes(shape, workload, *sizes)
    else:
        terms = training_bytes(shape, workload, *sizes)
    terms = {name: term * fixed_share if name in FIXED else term for name, term in terms.items()}
    kept = np.asarray(sum(term for name, term in terms.items() if name in PERSISTENT))
    return StageMemories(
        persistent_bytes=kept, transient_bytes=np.asarray(sum(terms.values())) - kept, terms=terms
    )


def stage_memory(
    model_stage: ModelStage,
    tp: int,
    pp: int,
    dp: int,
    ep: int = 1,
    cp: int = 1,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
) -> StageMemory:
    """Memory of a model-stage with `dp` units of layout (tp, pp, ep, cp)."""
    sizes = (tp, pp, dp, ep, cp)
    return stage_memories(model_stage, *sizes, workload=workload, cluster=cluster, gpu_kind=gpu_kind).at(0)


def rank_memories(
    model_stage: ModelStage,
    tp: int,
    pp: int,
    dp: int,
    ep: int = 1,
    cp: int = 1,
    *,
    workload: Workload,
) -> tuple[StageMemory, ...]:
    """Memory of every pipeline stage of one unit, first to last; all ranks of a stage hold as much at most.

    The first layers take the remainder of an uneven split, as layouts do.
    """
    shape, one = workload.shape(model_stage), np.ones(1)
    sizes = (tp * one, pp * one, dp * one, ep * one, cp * one)
    base, extra = divmod(shape.num_layers, pp)
    split = tuple(base + (index < extra) for index in range(pp))
    found = []
    for index in range(pp):
        if model_stage.stage is Stage.TRAINING:
            terms = training_bytes(shape, workload, *sizes, split=split, only=index)
        else:
            if model_stage.stage is Stage.GENERATION:
                terms = generation_bytes(shape, workload, *sizes[:4])
            else:
                terms = inference_bytes(shape, workload, *sizes)
            terms["weights"] = workload.dtype_bytes * stage_parameters(shape, one * tp, split, index, ep)
            if "kv_cache" in terms:
                terms["kv_cache"] = terms["kv_cache"] * split[index] / split[0]
            if index < pp - 1:
                terms["logits"] = terms["logits"] * 0
        kept = np.asarray(sum(term for name, term in terms.items() if name in PERSISTENT))
        rest = np.asarray(sum(terms.values())) - kept
        found.append(StageMemories(persistent_bytes=kept, transient_bytes=rest, terms=terms).at(0))
    return tuple(found)


def usable_bytes(cluster: ClusterProfile, gpu_kind: str) -> int:
    """What a plan may use of one GPU: its memory less the margin."""
    return int(cluster.pool(gpu_kind).gpu.memory_bytes * (1 - MARGIN))


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
    present = {
        (name, term): size
        for name, memory in memories.items()
        for term, size in memory.terms.items()
        if term in PERSISTENT or name is peak
    }
    name, term = max(present, key=lambda key: present[key])
    return MemoryVerdict(needed_bytes=needed, usable_bytes=usable, breaks=f"{name} {term}")


def transition_peak(old_bytes: int, new_bytes: int, *, chunk_bytes: int | None = None) -> int:
    """Bytes at the worst moment of a transition: old and new shadows, or one shard and a chunk.

    Bounded mode (`chunk_bytes`) frees each chunk's source before the next chunk's destination exists.
    """
    if chunk_bytes is None:
        return old_bytes + new_bytes
    return max(old_bytes, new_bytes) + chunk_bytes
