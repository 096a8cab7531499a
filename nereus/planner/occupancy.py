"""What meets on each GPU under a plan: which model-stages keep how much there, and the peak on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.planner.plan import Plan
from nereus.planner.workload import ModelStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Ranks that hold the same model-stages. Sizes are of one GPU, in bytes.

    `resident_bytes` stays all the time; `peak_bytes` is the largest transient part, of `peak`, on top of it.
    """

    ranks: tuple[int, ...]
    gpu_kind: str
    resident_bytes: Mapping[ModelStage, int]
    peak: ModelStage
    peak_bytes: int
    usable_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything at the worst moment."""
        return sum(self.resident_bytes.values()) + self.peak_bytes


def occupancy(plan: Plan) -> tuple[Occupancy, ...]:
    """The busy ranks of a plan in groups, in rank order. Idle ranks are left out."""
    present: dict[int, list[ModelStage]] = {}
    for item in plan.assignments:
        for rank in item.ranks:
            present.setdefault(rank, []).append(item.model_stage)
    groups: dict[tuple[ModelStage, ...], list[int]] = {}
    for rank in sorted(present):
        groups.setdefault(tuple(present[rank]), []).append(rank)
    usable = {pool.gpu_kind: pool.usable_bytes for pool in plan.pools}
    found = []
    for names, ranks in groups.items():
        items = [plan.of(name) for name in names]
        peak = max(items, key=lambda item: item.memory.transient_bytes)
        found.append(
            Occupancy(
                ranks=tuple(ranks),
                gpu_kind=items[0].gpu_kind,
                resident_bytes={item.model_stage: item.resident_bytes for item in items},
                peak=peak.model_stage,
                peak_bytes=peak.memory.transient_bytes,
                usable_bytes=usable[items[0].gpu_kind],
            )
        )
    return tuple(found)
