"""The candidate of a model-stage that needs the least memory, and what it still needs too much of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.planner.candidate_set import stage_options
from nereus.planner.fixed import Cut
from nereus.planner.layouts import layouts
from nereus.planner.memory import stage_memories, usable_bytes
from nereus.planner.request import PlanRequest
from nereus.planner.workload import ModelStage

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Least bytes a GPU of any candidate, against what is usable there, and its largest term."""

    model_stage: ModelStage
    needed_bytes: int
    usable_bytes: int
    term: str
    term_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the leanest candidate fits a GPU by itself."""
        return self.needed_bytes <= self.usable_bytes

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"needs {self.needed_bytes / GB:.1f} GB a GPU at least where {self.usable_bytes / GB:.1f} GB are "
            f"usable; most of it is {self.term.replace('_', ' ')} ({self.term_bytes / GB:.1f} GB)"
        )


def leanest(request: PlanRequest, model_stage: ModelStage, cut: Cut | None = None) -> Need:
    """The smallest need over layouts (or those with this (tp, pp, ep, cp)) and options, where it fits best.

    Assumes that there is such a layout.
    """
    needs: list[Need] = []
    for pool in request.cluster.pools:
        kind = pool.gpu.name
        sizes = layouts(model_stage, request.workload, pool, request.space, request.fixed)
        if cut is not None:
            at = np.stack([sizes[axis] for axis in (0, 1, 3, 4)])
            same = (at == np.array(cut, dtype=np.float64)[:, None]).all(axis=0)
            sizes = tuple(size[same] for size in sizes)
        if not len(sizes[0]):
            continue
        for option in stage_options(request, model_stage):
            memory = stage_memories(
                model_stage,
                *sizes,
                workload=option.apply(request.workload),
                cluster=request.cluster,
                gpu_kind=kind,
            )
            row = memory.at(int(np.argmin(memory.persistent_bytes + memory.transient_bytes)))
            term = max(row.terms, key=lambda name: row.terms[name])
            needs.append(
                Need(
                    model_stage=model_stage,
                    needed_bytes=row.total_bytes,
                    usable_bytes=usable_bytes(request.cluster, kind),
                    term=term,
                    term_bytes=row.terms[term],
                )
            )
    return min(needs, key=lambda need: need.needed_bytes - need.usable_bytes)
