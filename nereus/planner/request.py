"""A planning question: the work, the cluster, the space to search, what is fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations

from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.fixed import Fix
from nereus.planner.layouts import Space
from nereus.planner.profile import ClusterProfile
from nereus.planner.workload import Model, Recompute, Stage, Workload


class Placement(StrEnum):
    """Whether generation takes turns with the other stages on the same GPUs or has its own."""

    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


class Turns(StrEnum):
    """Whether the models of one stage may run one after another on the same GPUs.

    Elastic units hold that within a stage a rank belongs to one unit (invariant I1), hence `NEVER` by
    default.
    """

    NEVER = "never"
    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How stages and models share GPUs: where generation runs, and in which stages the models take turns."""

    placement: Placement
    in_turn: frozenset[Stage] = frozenset()

    def __str__(self) -> str:
        turns = [f"{stage} in turn" for stage in Stage if stage in self.in_turn]
        return ", ".join([str(self.placement), *turns])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The choices of a model-stage beside its layout. None in `max_residents`: all sequences at once."""

    train_micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    score_micro_batches: tuple[int, ...] = (1, 4, 16)
    recomputes: tuple[Recompute, ...] = (Recompute.NONE, Recompute.FULL)
    max_residents: tuple[int | None, ...] = (None, 256, 64)

    @property
    def dealt_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches of a mixture, whose rows are dealt over ep: up to 8 for each of 8 ranks."""
        most = max(self.train_micro_batches)
        return tuple(sorted({*self.train_micro_batches, *(most << power for power in range(1, 4))}))


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

    The models in `share` must serve and train with one layout. The micro-batch, recompute and residency
    of `workload` are not used: `options` and `fixed` hold them.
    """

    workload: Workload
    cluster: ClusterProfile
    space: Space = Space.POW2
    placement: Placement | None = None
    turns: Turns = Turns.NEVER
    share: frozenset[Model] = frozenset()
    options: StageOptions = StageOptions()
    fixed: tuple[Fix, ...] = ()
    calibration: Calibration = NEUTRAL

    @property
    def arrangements(self) -> tuple[Arrangement, ...]:
        """All that may be chosen, the most usual first. Generation beside the rest needs GPUs of its own."""
        stages = [item.stage for item in self.workload.model_stages]
        shared = [stage for stage in Stage if stages.count(stage) > 1]
        if self.turns is Turns.NEVER:
            turns = [frozenset[Stage]()]
        elif self.turns is Turns.ALWAYS:
            turns = [frozenset(shared)]
        else:
            sizes = range(len(shared) + 1)
            turns = [frozenset(some) for size in sizes for some in combinations(shared, size)]
        if self.workload.schedule.overlaps:  # I17
            placements: tuple[Placement, ...] = (Placement.DISAGGREGATED,)
        else:
            placements = tuple(Placement) if self.placement is None else (self.placement,)
        return tuple(
            Arrangement(placement=placement, in_turn=in_turn) for in_turn in turns for placement in placements
        )
