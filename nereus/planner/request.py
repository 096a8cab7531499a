"""A planning question: the work, the cluster, the space to search, what is fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.fixed import Fix
from nereus.planner.layouts import Space
from nereus.planner.profile import ClusterProfile
from nereus.planner.workload import Recompute, Workload


class Placement(StrEnum):
    """Whether generation takes turns with the other stages on the same GPUs or has its own."""

    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The choices of a model-stage beside its layout. None in `max_residents`: all sequences at once."""

    train_micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    score_micro_batches: tuple[int, ...] = (1, 4, 16)
    recomputes: tuple[Recompute, ...] = (Recompute.NONE, Recompute.FULL)
    max_residents: tuple[int | None, ...] = (None, 256, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One combination of a model-stage's own options; None where the stage has no such option.

    In generation `max_resident` None means that all sequences of a unit are held at once.
    """

    micro_batch: int | None = None
    recompute: Recompute | None = None
    max_resident: int | None = None

    def apply(self, workload: Workload) -> Workload:
        """The workload done this way."""
        return replace(
            workload,
            micro_batch=self.micro_batch or workload.micro_batch,
            recompute=self.recompute or workload.recompute,
            max_resident=self.max_resident,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for. `placement` None lets the search choose.

    The micro-batch, recompute and residency of `workload` are not used: `options` and `fixed` hold them.
    """

    workload: Workload
    cluster: ClusterProfile
    space: Space = Space.POW2
    placement: Placement | None = None
    options: StageOptions = StageOptions()
    fixed: tuple[Fix, ...] = ()
    calibration: Calibration = NEUTRAL
