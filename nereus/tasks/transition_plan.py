"""What a transition of the running job consists of: operations in a certified order, with their orders. Pure.

```
model-stages now  ─┐                                          ┌ chain that makes units: a reshard plan
                   ├▶ units ─▶ graph ─▶ schedule ─▶ operations ┤ chain that only ends some: shards to drop
model-stages then ─┘                                          └ later operations of a chain: nothing to send
```
The state of training, inference and generation moves. Generation has no state of its own where it shares
the training units' weights; where another engine stores it, or workers were lost, it is synced afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nereus.emu.chain_time import Seconds
from nereus.emu.chains import Chain
from nereus.emu.graph import Node, TransitionGraph, build_graph
from nereus.emu.layout import Layout, Rank
from nereus.emu.operations import Destroy, Extend
from nereus.emu.optimizer_slices import seat
from nereus.emu.placement import Placement
from nereus.emu.precedence import precedence
from nereus.emu.rank_plan import RankPlan
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.schedule import Schedule, schedule
from nereus.emu.schedule_problem import Room
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.stage import StageSpec
from nereus.emu.target import place_target
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.transaction import Order
from nereus.emu.transition_text import node_text
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.tasks.stages import GENERATION, TRAINING

AMPLE = Room(cap_bytes=1 << 60)
Stages = Mapping[str, StageSpec]
Asked = frozenset[tuple[str, tuple[Layout, ...]]]


@dataclass(frozen=True, kw_only=True)
class PlannedOperation:
    """One operation of the graph. `after` are the ids of those it waits for.

    `orders` say what each worker that takes part has to do; they are empty where the operation `carrier` of
    the same chain moves the bytes, so that `bytes` is 0. `ranks` are the GPUs whose units it touches.
    """

    id: str
    kind: str
    model_stage: str
    text: str
    after: tuple[str, ...]
    ranks: tuple[Rank, ...]
    orders: Mapping[Rank, Order]
    bytes: int
    carrier: str | None = None


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What changes: operations in the order of the schedule, predecessors first, and all model-stages after.

    `plans` are the reshard plans by chain; `in_memory` are the model-stages whose state lies in the workers
    after the commit, the others are synced; `asked` is the plan before ranks were permuted.
    """

    schedule: Schedule
    plans: Mapping[str, ReshardPlan]
    operations: tuple[PlannedOperation, ...]
    stages: Stages
    in_memory: frozenset[str]
    asked: Asked

    @property
    def graph(self) -> TransitionGraph:
        """The operations and who waits for whom."""
        return self.schedule.graph

    @property
    def movers(self) -> tuple[Rank, ...]:
        """The workers that have a part."""
        return tuple(sorted({rank for operation in self.operations for rank in operation.orders}))

    @property
    def bytes(self) -> int:
        """Bytes that cross between workers, a weight sync that follows not counted."""
        return sum(plan.bytes for plan in self.plans.values())

    @property
    def lower_bound(self) -> int:
        """The least that any transfer to this placement can move."""
        return sum(plan.lower_bound for plan in self.plans.values())

    @property
    def text(self) -> str:
        """The new plan of every model-stage that moves, for people."""
        moved = dict.fromkeys(operation.model_stage for operation in self.operations)
        named = (f"{name} to {self.stages[name].text}" for name in moved if name in self.stages)
        return f"moving {', '.join(named) or 'generation only'} ({self.bytes / 1e6:.1f} MB)"


def asked_of(stages: Stages) -> Asked:
    """A plan by what tells it from others: the units of every model-stage."""
    return frozenset((name, spec.units) for name, spec in stages.items())


def plan_transition(
    now: Stages,
    then: Stages,
    *,
    lost: frozenset[Rank] = frozenset(),
    topology: Topology | None = None,
    room: Room = AMPLE,
) -> Transition:
    """Plan the change. Ranks of new units are permuted among themselves where that moves fewer bytes.

    What the ranks in `lost` hold is no source: they died, or their state is stale. Raises NoSource or
    InvalidOperation when the state cannot be moved, Infeasible when it does not fit into `room`; nothing has
    happened then.
    """
    ranks = {rank for spec in (*now.values(), *then.values()) for rank in spec.ranks}
    topology = topology or Topology.single_node(1 + max(ranks))
    sources, targets = _moving(now, lost), _moving(then, lost)
    trained = [name for name, spec in targets.items() if spec.role == "training"]
    targets |= {name: _seated(sources[name], targets[name], topology, lost) for name in trained}
    broken = {name for name, spec in sources.items() if lost & set(spec.ranks)}
    models = {_model(name): spec.tensors for name, spec in targets.items()}
    before = cluster_state((spec for name, spec in sources.items() if name not in broken), ranks)
    asked = cluster_state((spec for name, spec in targets.items() if name not in broken), ranks)
    after = place_target(before, asked, models, topology)
    graph = build_graph(before, after, topology)
    plans = {
        chain.id: plan for chain in graph.chains if (plan := chain.reshard_plan(models, topology)) is not None
    }
    units = {name: tuple(unit.layout for unit in after.replicas(name)) for name in targets}
    for name in sorted(broken):
        old, new = _units(sources[name]), _units(targets[name])
        chain, plan = _repair(sources[name].tensors, old, new, topology, lost)
        graph = _with_chain(graph, chain, old)
        plans[chain.id] = plan
        units[name] = tuple(unit.layout for unit in plan.new)
    for name in trained:
        spec = targets[name]
        old, new = sources[name].optimizer_units, replace(spec, units=units[name]).optimizer_units
        if not new or (old == new and name not in broken):
            continue
        chain, plan = _repair(spec.tensors, old, new, topology, lost, placement="as_given")
        graph = _with_chain(graph, chain, old)
        plans[chain.id] = plan
    found = schedule(graph, sizes_of(models), room, topology, _timed_by(plans))
    return Transition(
        schedule=found,
        plans=plans,
        operations=tuple(_operations(found, plans, models)),
        stages=_placed(then, units),
        in_memory=frozenset(targets),
        asked=asked_of(then),
    )


def _moving(stages: Stages, lost: frozenset[Rank]) -> dict[str, StageSpec]:
    """The model-stages whose state moves in a transition; see the head of this file."""
    training, generation = stages[TRAINING], stages[GENERATION]
    own = generation.shares is None and generation.engine == training.engine and not lost
    return {name: spec for name, spec in stages.items() if name != GENERATION or own}


def cluster_state(stages: Iterable[StageSpec], ranks: Iterable[Rank]) -> ClusterState:
    """The units that hold state of their own.

    Not checked against I1: a user may put two trained models on the same GPUs, which then take turns.
    """
    units = [
        unit
        for spec in stages
        if spec.shares is None
        for unit in spec.elastic_units(spec.kinds, model=_model(spec.name))
    ]
    return ClusterState(units=tuple(sorted(units, key=lambda unit: unit.id)), ranks=frozenset(ranks))


def _model(model_stage: str) -> str:
    return model_stage.partition(".")[0]


def _units(spec: StageSpec) -> tuple[Unit, ...]:
    return spec.elastic_units(spec.kinds, model=_model(spec.name))


def _seated(now: StageSpec, then: StageSpec, topology: Topology, lost: frozenset[Rank]) -> StageSpec:
    """The units asked for; those that share an optimizer in the order in which most of it stays."""
    if not then.zero1 or now.units == then.units:
        return then
    units = seat(now.tensors, _units(now), now.optimizer_units, _units(then), topology, lost=lost)
    return replace(then, units=tuple(unit.layout for unit in units))


def _repair(
    model: ModelSpec,
    old: Sequence[Unit],
    asked: Sequence[Unit],
    topology: Topology,
    lost: frozenset[Rank],
    *,
    placement: Placement = "max_overlap",
) -> tuple[Chain, ReshardPlan]:
    """One plan for a model-stage that lost workers, or for an optimizer that units share.

    The four operations speak of whole units, so its units are extended, each from whoever holds a part, and
    then those that broke or are left over are destroyed.
    """
    name = old[0].model_stage
    twins = {unit.layout: unit for unit in old}
    fresh = iter(range(len(old), len(old) + len(asked)))
    new = [twins.get(unit.layout) or unit.with_id(UnitId(name, next(fresh))) for unit in asked]
    plan = plan_reshard(model, old, new, topology=topology, lost=lost, placement=placement)
    makes = tuple(unit for unit in plan.new if unit not in old)
    ends = tuple(unit for unit in old if unit not in plan.new)
    into = tuple((unit.id, unit.layout) for unit in makes)
    extends = (Extend(sources=tuple(unit.id for unit in old), into=into),) if makes else ()
    chain = Chain(
        id=f"{name}:repair",
        model_stage=name,
        operations=(*extends, *(Destroy(unit=unit.id) for unit in ends)),
        reads=tuple(old) if makes else (),
        ends=ends,
        makes=makes,
    )
    return chain, plan


def _with_chain(graph: TransitionGraph, chain: Chain, held: Sequence[Unit]) -> TransitionGraph:
    chains = (*graph.chains, chain)
    before = replace(graph.before, units=(*graph.before.units, *held))
    return replace(graph, before=before, chains=chains, edges=precedence(chains))


def _timed_by(plans: Mapping[str, ReshardPlan]) -> Seconds:
    """A chain takes as long as its plan says, on the topology that it was made for."""
    return lambda chain: plans[chain.id].seconds() if chain.makes else 0.0


def _operations(
    found: Schedule, plans: Mapping[str, ReshardPlan], models: Mapping[str, ModelSpec]
) -> Iterable[PlannedOperation]:
    """Every operation in the order of the schedule, which puts predecessors first."""
    graph = found.graph
    nodes: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.kind != "spill":
            nodes.setdefault(node.chain, []).append(node)
    for slot in found.slots:
        if slot.spill is not None:
            continue  # workers cannot spill yet: a room without end asks for none
        chain = graph.chains[slot.chain]
        leader = nodes[slot.chain][0]
        for node in nodes[slot.chain]:
            plan = plans.get(chain.id) if node.leads else None
            yield PlannedOperation(
                id=node.id,
                kind=node.kind,
                model_stage=chain.model_stage,
                text=node_text(graph, node, None if plan is None else plan.bytes),
                after=graph.predecessors(node.id),
                ranks=tuple(sorted(_ranks(chain))),
                orders=_orders(chain, plan, models) if node.leads else {},
                bytes=0 if plan is None else plan.bytes,
                carrier=None if node.leads else leader.id,
            )


def _ranks(chain: Chain) -> set[Rank]:
    return {rank for unit in (*chain.reads, *chain.ends, *chain.makes) for rank in unit.layout.ranks}


def _orders(chain: Chain, plan: ReshardPlan | None, models: Mapping[str, ModelSpec]) -> dict[Rank, Order]:
    """What each worker does for a chain: its part of the plan, or dropping a shard where nothing is made."""
    if plan is not None:
        source = chain.reads[0].model_stage if chain.reads else chain.model_stage
        return {
            rank: Order(source=source, target=chain.model_stage, model=plan.model, plan=plan.rank_plan(rank))
            for rank in plan.ranks
        }
    model = models[chain.model]
    return {
        rank: Order(source=chain.model_stage, target=chain.model_stage, model=model, plan=_drop(unit, rank))
        for unit in chain.ends
        for rank in unit.layout.ranks
    }


def _drop(unit: Unit, rank: Rank) -> RankPlan:
    """A plan of a rank that gives up its shard: nothing is sent, and the commit frees it."""
    return RankPlan(
        rank=rank, ranks=(), digest=f"drop {unit.id}", mode="shadow", old=unit, new=None, chunks=()
    )


def _placed(then: Stages, units: Mapping[str, tuple[Layout, ...]]) -> dict[str, StageSpec]:
    """The model-stages asked for, on the ranks that were chosen."""
    stages = {name: replace(spec, units=units.get(name) or spec.units) for name, spec in then.items()}
    if stages[GENERATION].shares is not None:
        stages[GENERATION] = replace(stages[GENERATION], units=stages[TRAINING].units)
    return stages
