"""The plan: a layout, a number of units and a GPU set for every model-stage, and what the step then costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nereus.planner.cost import StageCost
from nereus.planner.fixed import Cut
from nereus.planner.memory import StageMemory
from nereus.planner.request import Arrangement, Option
from nereus.planner.workload import ModelStage, Schedule, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One model-stage's part of a plan.

    `ranks` lists unit after unit in layout order; a unit's TP groups lie inside a node. `layers[i]` is
    the number of layers of pipeline stage i. With `shares_weights` the weights are those of the same
    model's training, on the same ranks: they count there, not here.
    """

    model_stage: ModelStage
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    gpu_kind: str
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    option: Option
    shares_weights: bool
    publish_s: float
    cost: StageCost
    memory: StageMemory

    @property
    def cut(self) -> Cut:
        """How a unit is cut."""
        return self.tp, self.pp, self.ep, self.cp

    @property
    def num_gpus(self) -> int:
        """GPUs that the model-stage occupies."""
        return self.unit_size * self.dp

    @property
    def unit_size(self) -> int:
        """Ranks of one unit."""
        return self.tp * self.pp * self.ep * self.cp

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each unit in layout order."""
        size = self.unit_size
        return tuple(self.ranks[at : at + size] for at in range(0, len(self.ranks), size))

    @property
    def text(self) -> str:
        """E.g. "tp2 pp1 dp4"; ep and cp where they are above 1."""
        more = "".join(f" {axis}{size}" for axis, size in self.more_axes.items())
        return f"tp{self.tp} pp{self.pp}{more} dp{self.dp}"

    @property
    def more_axes(self) -> dict[str, int]:
        """ep and cp, where they are above 1."""
        return {axis: size for axis, size in (("ep", self.ep), ("cp", self.cp)) if size > 1}

    @property
    def resident_bytes(self) -> int:
        """What stays on a GPU for this model-stage while other stages run."""
        return 0 if self.shares_weights else self.memory.persistent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """One GPU kind under a plan: GPUs taken by stage, and the bytes that meet on its fullest GPU.

    `used_bytes` adds up, over stages, the largest persistent part, plus the largest transient part;
    generation on its own GPUs counts by itself.
    """

    gpu_kind: str
    num_gpus: int
    usable_bytes: int
    used_bytes: int
    used_gpus: Mapping[Stage, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Why no plan of the space is better: the search ended with `lower_bound_s` = the plan's step.

    `root_bound_s` is what could be said before any search: every stage alone, memory left aside.
    """

    lower_bound_s: float
    root_bound_s: float
    num_candidates: int
    num_partial_plans: int
    search_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best plan of a request. `stage_s` is a stage's longest model-stage, or all of them taking turns."""

    assignments: tuple[Assignment, ...]
    arrangement: Arrangement
    schedule: Schedule
    step_s: float
    stage_s: Mapping[Stage, float]
    publish_s: float
    pools: tuple[PoolUse, ...]
    proof: Proof

    def of(self, model_stage: ModelStage) -> Assignment:
        """The assignment of a model-stage. Raises KeyError where the job has none."""
        for assignment in self.assignments:
            if assignment.model_stage is model_stage:
                return assignment
        raise KeyError(model_stage)

    @property
    def bottleneck(self) -> tuple[Assignment, str]:
        """The model-stage that the step waits for longest, and the largest term of its time."""
        slowest = max(self.assignments, key=lambda item: item.cost.latency_s)
        return slowest, slowest.cost.bottleneck

    @property
    def signature(self) -> tuple[tuple[str, int, int, int, int], ...]:
        """(tp, pp, ep, cp) of the actor's two stages: equal ones make plans variations of one idea."""
        return tuple(
            (str(item.model_stage), item.tp, item.pp, item.ep, item.cp)
            for item in self.assignments
            if item.model_stage in (ModelStage.ACTOR_GENERATION, ModelStage.ACTOR_TRAINING)
        )

    def to_campaign(self) -> dict[str, dict[str, Any]]:
        """The `plan` of a campaign's configuration, where the critic's two stages have one layout."""
        items = {item.model_stage: item for item in self.assignments}
        return {
            key: {
                "tp": items[stage].tp,
                "pp": items[stage].pp,
                "dp": items[stage].dp,
                **items[stage].more_axes,
                "gpus": list(items[stage].ranks),
                "layers": list(items[stage].layers),
            }
            for stage, key in _CAMPAIGN_KEYS.items()
            if stage in items
        }

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "step_s": self.step_s,
            "placement": str(self.arrangement.placement),
            "in_turn": sorted(str(stage) for stage in self.arrangement.in_turn),
            "schedule": str(self.schedule),
            "stage_s": {str(stage): seconds for stage, seconds in self.stage_s.items()},
            "publish_s": self.publish_s,
            "assignments": [_assignment_json(item) for item in self.assignments],
            "pools": [
                {**asdict(pool), "used_gpus": {str(stage): count for stage, count in pool.used_gpus.items()}}
                for pool in self.pools
            ],
            "proof": asdict(self.proof),
        }


_CAMPAIGN_KEYS = {
    ModelStage.ACTOR_TRAINING: "actor_training",
    ModelStage.ACTOR_GENERATION: "actor_generation",
    ModelStage.CRITIC_TRAINING: "critic_training",
    ModelStage.REFERENCE_INFERENCE: "reference_inference",
    ModelStage.REWARD_INFERENCE: "reward_inference",
}


def _assignment_json(item: Assignment) -> dict[str, Any]:
    option = {name: value for name, value in asdict(item.option).items() if value is not None}
    return {
        "model_stage": str(item.model_stage),
        "tp": item.tp,
        "pp": item.pp,
        "dp": item.dp,
        "ep": item.ep,
        "cp": item.cp,
        "num_gpus": item.num_gpus,
        "gpu_kind": item.gpu_kind,
        "ranks": list(item.ranks),
        "layers": list(item.layers),
        **option,
        "shares_weights": item.shares_weights,
        "latency_s": item.cost.latency_s,
        "latency_terms_s": dict(item.cost.terms),
        "persistent_bytes": item.memory.persistent_bytes,
        "transient_bytes": item.memory.transient_bytes,
        "memory_terms_bytes": dict(item.memory.terms),
    }
