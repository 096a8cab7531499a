"""What the way from one plan to another takes: the transition's graph and schedule, timed, plus fixed costs.

The same graph and schedule as a live transition runs; chains are timed by their reshard plans over the
cluster's links. Nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nereus.emu.chain_time import planned
from nereus.emu.decoder import DType, decoder_spec
from nereus.emu.graph import build_graph
from nereus.emu.kinds import kinds_of, serving_kinds
from nereus.emu.layout import Layout
from nereus.emu.lora import trained_part
from nereus.emu.schedule import schedule
from nereus.emu.schedule_problem import Room
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Link, Topology
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import Infeasible, InvalidOperation, NoSource
from nereus.planner.memory import usable_bytes
from nereus.planner.outlook import UNCHANGED
from nereus.planner.profile import ClusterProfile, LinkProfile
from nereus.planner.seating import Seated
from nereus.planner.signals import Gpu, GpuId
from nereus.planner.workload import ModelShapes, ModelStage, Stage

_DTYPES: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCosts:
    """Seconds of a transition that no byte explains: votes, decision, new process groups, engines anew.

    `moving_factor` is measured over predicted seconds of moving the bytes: messages, packing.
    `generation_s` comes on top where a unit of generation is made: an engine that is dear to make, whose
    layout is fixed. `restart_s` is what it takes instead when no live GPU holds the state of a trained model,
    or old and new state fit nowhere: all stops, and resumes from the last checkpoint under the new plan. A
    model that does not change is read from its folder then, at `read_bytes_per_s` for the whole job. Without
    `in_place` every change is a restart.
    """

    transition_s: float
    restart_s: float
    generation_s: float = 0.0
    moving_factor: float = 1.0
    in_place: bool = True
    read_bytes_per_s: float = 2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionCost:
    """Predicted seconds of a transition: `moving_s` by the schedule, `reading_s` for what no live GPU holds
    and is read from its folder, `fixed_s` beside. `from_checkpoint` names why the state has to come from the
    checkpoint, None where it moves in place.
    """

    moving_s: float
    fixed_s: float
    num_operations: int
    reading_s: float = 0.0
    from_checkpoint: str | None = None

    @property
    def seconds(self) -> float:
        """All together."""
        return self.moving_s + self.reading_s + self.fixed_s

    def times(self, factor: float) -> TransitionCost:
        """The same with all seconds so many times as long."""
        return replace(
            self,
            moving_s=factor * self.moving_s,
            fixed_s=factor * self.fixed_s,
            reading_s=factor * self.reading_s,
        )


def transition_cost(
    before: Seated,
    after: Seated,
    pool: Iterable[Gpu],
    models: ModelShapes,
    dtype: str,
    fixed: FixedCosts,
) -> TransitionCost:
    """Predict the transition on the GPUs of `pool` that still live; units with a lost GPU hold nothing.

    `models` and `dtype` are the workload's. What cannot move in place is priced as a restart, and says so.
    """
    if not fixed.in_place:
        return _restart(fixed, "the job cannot move in place")
    gpus = tuple(pool)
    alive = frozenset(gpu.id for gpu in gpus)
    topology = topology_of(gpus, after.cluster)
    specs = _specs(models, dtype)
    held, wanted = (cluster_state(seated, alive, models, dtype) for seated in (before, after))
    lost = frozenset(map(str, lost_unchanged(before, alive)))
    wanted, read = _without(wanted, lost), [unit for unit in wanted.units if unit.model_stage in lost]
    replica_bytes = state_bytes(models, dtype)
    try:
        graph = build_graph(held, wanted, topology)
        sizes = sizes_of(specs)
        room = Room(cap_bytes=usable_bytes(after.cluster, after.cluster.gpu_kinds[0]))
        plan = schedule(graph, sizes, room, topology, planned(specs, topology), tries=1)
    except (NoSource, InvalidOperation, Infeasible) as error:
        return _restart(fixed, str(error))
    num_operations = sum(len(chain.operations) for chain in graph.chains)
    makes_generation = serving_units(after) - serving_units(before)
    fixed_s = fixed.transition_s + (fixed.generation_s if makes_generation else 0.0)
    return TransitionCost(
        moving_s=fixed.moving_factor * plan.makespan_s,
        reading_s=sum(replica_bytes[unit.model_stage] for unit in read) / fixed.read_bytes_per_s,
        fixed_s=fixed_s if num_operations or makes_generation or read else 0.0,
        num_operations=num_operations,
    )


def serving_units(seated: Seated) -> frozenset[Layout]:
    """The units of generation."""
    return frozenset(
        Layout(tp=item.tp, pp=item.pp, ranks=ranks, layers=item.layers, ep=item.ep, cp=item.cp)
        for item in seated.plan.assignments
        if item.model_stage is ModelStage.ACTOR_GENERATION
        for ranks in seated.units(item)
    )


def lost_unchanged(before: Seated, alive: frozenset[GpuId]) -> frozenset[ModelStage]:
    """The model-stages of models that do not change of which no live unit is left."""
    return frozenset(
        item.model_stage
        for item in before.plan.assignments
        if item.model_stage in UNCHANGED and not any(map(alive.issuperset, before.units(item)))
    )


def _without(state: ClusterState, model_stages: frozenset[str]) -> ClusterState:
    return replace(state, units=tuple(unit for unit in state.units if unit.model_stage not in model_stages))


def _restart(fixed: FixedCosts, why: str) -> TransitionCost:
    return TransitionCost(moving_s=0.0, fixed_s=fixed.restart_s, num_operations=0, from_checkpoint=why)


def cluster_state(seated: Seated, alive: frozenset[GpuId], models: ModelShapes, dtype: str) -> ClusterState:
    """The units of a plan on GPUs that live; a unit with a lost GPU is gone. Shared weights count once.

    The optimizer's state of adapters, about a hundredth of all state, does not count.
    """
    units = [
        Unit(
            id=UnitId(str(item.model_stage), number),
            model=str(item.model_stage.model),
            layout=Layout(tp=item.tp, pp=item.pp, ranks=ranks, layers=item.layers, ep=item.ep, cp=item.cp),
            kinds=serving_kinds(_DTYPES[dtype])
            if _has_adapters(models, item.model_stage)
            else kinds_of(item.model_stage.stage, _DTYPES[dtype]),
        )
        for item in seated.plan.assignments
        if not item.shares_weights
        for number, ranks in enumerate(seated.units(item))
        if alive.issuperset(ranks)
    ]
    return ClusterState.of(units, alive)


def topology_of(pool: Iterable[Gpu], cluster: ClusterProfile) -> Topology:
    """The pool's nodes with the cluster's links at the bandwidth that large transfers reach."""
    nodes: dict[int, list[GpuId]] = {}
    for gpu in sorted(pool):
        nodes.setdefault(gpu.node, []).append(gpu.id)
    kind = cluster.pools[0]
    return Topology(
        nodes=tuple(tuple(ids) for ids in nodes.values()),
        memory=Link(bytes_per_s=kind.gpu.memory_bandwidth_Bps / 2, latency_s=5e-6),  # a copy reads and writes
        node=_link(kind.scale_up),
        network=_link(cluster.scale_out),
    )


def _link(profile: LinkProfile) -> Link:
    return Link(bytes_per_s=profile.bandwidth_Bps * profile.efficiency, latency_s=profile.latency_s)


def state_bytes(models: ModelShapes, dtype: str) -> dict[str, float]:
    """Bytes of one whole replica of every model-stage."""
    sizes = {}
    for stage in ModelStage:
        shape = models.of(stage.model)
        if shape is None:
            continue
        theta, kinds = serving_kinds(_DTYPES[dtype]), kinds_of(stage.stage, _DTYPES[dtype])
        trained, each = trained_part(decoder_spec(shape)).num_elements, sum(kind.num_bytes for kind in theta)
        more = sum(kind.num_bytes for kind in kinds) - each
        sizes[str(stage)] = float(shape.num_parameters * each + trained * more)
    return sizes


def _has_adapters(models: ModelShapes, stage: ModelStage) -> bool:
    shape = models.of(stage.model)
    return stage.stage is Stage.TRAINING and shape is not None and shape.lora is not None


def _specs(models: ModelShapes, dtype: str) -> dict[str, ModelSpec]:
    named = {
        "actor": models.actor,
        "critic": models.critic,
        "reference": models.reference,
        "reward": models.reward,
    }
    return {
        name: decoder_spec(shape.with_dtype(_DTYPES[dtype]))
        for name, shape in named.items()
        if shape is not None
    }
