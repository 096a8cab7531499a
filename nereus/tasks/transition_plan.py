"""What a transition of the running job consists of: operations in a certified order, with their orders. Pure.

```
model-stages now  ─┐                                          ┌ chain that makes units: a reshard plan
                   ├▶ units ─▶ graph ─▶ schedule ─▶ operations ┤ chain that only ends some: shards to drop
model-stages then ─┘                                          └ later operations of a chain: nothing to send
```
The state of training, inference and generation moves. Generation has no state of its own where it shares
the training units' weights; where another engine stores it, or workers were lost, it is synced afterwards. A
model that does not change and of which no whole unit is left is read from its folder afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nereus.emu.bounded import Change, choose_together
from nereus.emu.chain_time import Seconds
from nereus.emu.chains import Chain
from nereus.emu.graph import Node, TransitionGraph, build_graph
from nereus.emu.layout import Layout, Rank
from nereus.emu.optimizer_slices import seat
from nereus.emu.placement import Placement
from nereus.emu.precedence import precedence
from nereus.emu.rank_plan import Mode, RankPlan
from nereus.emu.reshard import Limits, ReshardPlan
from nereus.emu.schedule import Schedule, schedule
from nereus.emu.schedule_problem import Room
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.stage import StageSpec
from nereus.emu.target import place_target
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.transaction import Order
from nereus.emu.transition_text import node_text
from nereus.emu.unit import ClusterState, Unit
from nereus.errors import InvalidOperation, explain
from nereus.tasks.memory_room import held_bytes
from nereus.tasks.stages import GENERATION, TRAINING
from nereus.tasks.whole_move import whole_chain, whole_plan

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
    after the commit, the others are synced, or read from their folders; `asked` is the plan before ranks were
    permuted. Model-stages in `bounded` are moved after the decision, freeing what has moved. A transition
    that is `halfway` leads to units from which another one leads on to the plan; nothing is built in between.
    """

    schedule: Schedule
    plans: Mapping[str, ReshardPlan]
    operations: tuple[PlannedOperation, ...]
    stages: Stages
    in_memory: frozenset[str]
    asked: Asked
    bounded: frozenset[str] = frozenset()
    halfway: bool = False

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


@dataclass(frozen=True, kw_only=True)
class _Ground:
    """What all plans of a transition rest on. Ranks in `lost` died; `stale` are, by model-stage, live ranks
    whose state is of no worth.
    """

    topology: Topology
    limits: Limits | None
    room: Room
    lost: frozenset[Rank]
    stale: Mapping[str, frozenset[Rank]]

    def stale_in(self, name: str) -> frozenset[Rank]:
        """The live ranks that hold nothing of worth of a model-stage."""
        return self.stale.get(name, frozenset()) - self.lost

    def is_broken(self, spec: StageSpec) -> bool:
        """Whether some rank of the model-stage is no source."""
        return bool((self.lost | self.stale_in(spec.name)) & set(spec.ranks))


def plan_transition(
    now: Stages,
    then: Stages,
    *,
    lost: frozenset[Rank] = frozenset(),
    stale: Mapping[str, frozenset[Rank]] | None = None,
    topology: Topology | None = None,
    limits: Limits | None = None,
    room: Room = AMPLE,
    memory_bytes: Mapping[Rank, int] | None = None,
) -> Transition:
    """Plan the change. Ranks of new units are permuted among themselves where that moves fewer bytes.

    Ranks in `lost` died; `stale` names, by model-stage, live ones whose state is no source and that are
    filled anew. `memory_bytes` is what ranks may hold of all state at once: where old and new shards do not
    fit, some model-stages are moved in bounded mode, if need be in two transitions, of which this plans the
    first. Raises NoSource or InvalidOperation when the state cannot be moved, or when units that share an
    optimizer would no longer, or the other way round; Infeasible when it does not fit into `room`. Nothing
    has happened then.
    """
    _check_sharing(now, then)
    ranks = {rank for spec in (*now.values(), *then.values()) for rank in spec.ranks}
    ground = _Ground(
        topology=topology or Topology.single_node(1 + max(ranks)),
        limits=limits,
        room=room,
        lost=lost,
        stale=stale or {},
    )
    draft = _plan(now, then, ground)
    if not memory_bytes:
        return draft
    held = held_bytes(now)
    free = {
        rank: max(0, amount - held.get(rank, 0)) for rank, amount in memory_bytes.items() if rank not in lost
    }
    moves = choose_together(_changes(draft, now, ground), free)
    if not moves:
        return draft
    if all(len(chosen.plans) == 1 for chosen in moves.values()):
        return _plan(now, then, ground, {name: chosen.plans[0] for name, chosen in moves.items()})
    half = {
        name: chosen.plans[0]
        for name, chosen in moves.items()
        if len(chosen.plans) == 2 or ground.is_broken(now[name])
    }
    return replace(
        _plan(now, _halfway(now, then, half, ground), ground, half), halfway=True, asked=draft.asked
    )


def _check_sharing(now: Stages, then: Stages) -> None:
    changed = [name for name in now.keys() & then.keys() if now[name].zero1 != then[name].zero1]
    if changed:
        raise InvalidOperation(
            explain(
                "cannot plan the transition",
                values=f"optimizer.zero1 would change for {', '.join(sorted(changed))}",
                rule="whether units share an optimizer holds for a whole run",
                remedy="continue from a checkpoint with the other setting: it holds logical tensors",
            )
        )


def _plan(
    now: Stages, then: Stages, ground: _Ground, bounded: Mapping[str, ReshardPlan] | None = None
) -> Transition:
    """The transition in which the model-stages of `bounded` are moved by these plans, in bounded mode."""
    bounded = bounded or {}
    ranks = {rank for spec in (*now.values(), *then.values()) for rank in spec.ranks}
    is_emergency = bool(ground.lost or ground.stale)
    read = {name for name, spec in now.items() if _is_read_again(spec, ground)}
    sources, targets = (
        {name: spec for name, spec in _moving(stages, is_emergency).items() if name not in read}
        for stages in (now, then)
    )
    trained = [name for name, spec in targets.items() if spec.role == "training"]
    targets |= {name: _seated(sources[name], targets[name], ground) for name in trained}
    whole = {name for name, spec in sources.items() if name in bounded or ground.is_broken(spec)}
    models = {name: model for spec in targets.values() for name, model in spec.models.items()}
    before = cluster_state((spec for name, spec in sources.items() if name not in whole), ranks)
    asked = cluster_state((spec for name, spec in targets.items() if name not in whole), ranks)
    after = place_target(before, asked, models, ground.topology)
    graph = build_graph(before, after, ground.topology)
    plans = {
        chain.id: plan
        for chain in graph.chains
        if (plan := chain.reshard_plan(models, ground.topology, limits=ground.limits)) is not None
    }
    units = {name: tuple(unit.layout for unit in after.replicas(name)) for name in targets}
    joined = []
    for name in sorted(whole):
        plan = bounded.get(name) or _whole(sources[name], targets[name], ground, placement="max_overlap")
        units[name] = tuple(unit.layout for unit in plan.new)
        joined.append(plan)
    for name in trained:
        spec = replace(targets[name], units=units[name])
        held = sources[name]
        if spec.apart and (held.optimizer_units != spec.optimizer_units or ground.is_broken(held)):
            joined.append(_optimizer(held, spec, ground))
    for plan in joined:
        chain = whole_chain(plan)
        graph = _with_chain(graph, chain, plan.old)
        plans[chain.id] = plan
    found = schedule(graph, sizes_of(models), ground.room, ground.topology, _timed_by(plans))
    return Transition(
        schedule=found,
        plans=plans,
        operations=tuple(_operations(found, plans, models, bounded)),
        stages=_placed(then, units),
        in_memory=frozenset(targets),
        asked=asked_of(then),
        bounded=frozenset(bounded),
    )


def _is_read_again(spec: StageSpec, ground: _Ground) -> bool:
    """Whether a model-stage of a model that does not change has no whole unit left."""
    gone = ground.lost | ground.stale_in(spec.name)
    return spec.role == "inference" and all(gone.intersection(unit.ranks) for unit in spec.units)


def _whole(now: StageSpec, then: StageSpec, ground: _Ground, *, placement: Placement) -> ReshardPlan:
    """One plan for all of a model-stage."""
    return whole_plan(
        now.tensors,
        _units(now),
        _units(then),
        topology=ground.topology,
        limits=ground.limits,
        lost=ground.lost,
        stale=ground.stale_in(now.name),
        placement=placement,
    )


def _optimizer(now: StageSpec, then: StageSpec, ground: _Ground) -> ReshardPlan:
    """The plan of the optimizer state of a model-stage, where that is apart."""
    return whole_plan(
        then.trained,
        now.optimizer_units,
        then.optimizer_units,
        topology=ground.topology,
        limits=ground.limits,
        lost=ground.lost,
        stale=ground.stale_in(now.name),
        placement="as_given",
    )


def _changes(draft: Transition, now: Stages, ground: _Ground) -> dict[str, Change]:
    """What changes, by model-stage. One that had no units before can only move in shadow mode, and so can one
    whose optimizer's state is apart: where units share it, a slice has no second holder.
    """
    out: dict[str, Change] = {}
    for name in dict.fromkeys(operation.model_stage for operation in draft.operations):
        own = tuple(plan for chain, plan in draft.plans.items() if chain.partition(":")[0] == name)
        spec = now.get(name)
        can = spec is not None and spec.shares is None and not spec.apart and name in draft.in_memory
        whole = None
        if can and own and spec is not None:
            whole = _whole(spec, draft.stages[name], ground, placement="as_given")
        out[name] = Change(plans=own, whole=whole)
    return out


def _halfway(
    now: Stages, then: Stages, half: Mapping[str, ReshardPlan], ground: _Ground
) -> dict[str, StageSpec]:
    """The model-stages after the first of two transitions, in which those of `half` move, and what cannot
    stay.
    """
    stays = {name: spec if not ground.is_broken(spec) else then[name] for name, spec in now.items()}
    units = {name: tuple(unit.layout for unit in plan.new) for name, plan in half.items()}
    return _placed(stays, units)


def _moving(stages: Stages, is_emergency: bool) -> dict[str, StageSpec]:
    """The model-stages whose state moves in a transition; see the head of this file."""
    training, generation = stages[TRAINING], stages[GENERATION]
    own = generation.shares is None and generation.engine == training.engine and not is_emergency
    return {name: spec for name, spec in stages.items() if name != GENERATION or own}


def cluster_state(stages: Iterable[StageSpec], ranks: Iterable[Rank]) -> ClusterState:
    """The units that hold state of their own.

    Not checked against I1: a user may put two trained models on the same GPUs, which then take turns.
    """
    units = [unit for spec in stages if spec.shares is None for unit in spec.elastic_units(spec.kinds)]
    return ClusterState(units=tuple(sorted(units, key=lambda unit: unit.id)), ranks=frozenset(ranks))


def _units(spec: StageSpec) -> tuple[Unit, ...]:
    return spec.elastic_units(spec.kinds)


def _seated(now: StageSpec, then: StageSpec, ground: _Ground) -> StageSpec:
    """The units asked for; those that share an optimizer in the order in which most of it stays."""
    if not then.zero1 or now.units == then.units:
        return then
    gone = ground.lost | ground.stale_in(now.name)
    units = seat(
        now.tensors,
        _units(now),
        now.optimizer_units,
        _units(then),
        ground.topology,
        lost=gone,
        trained=now.trained,
    )
    return replace(then, units=tuple(unit.layout for unit in units))


def _with_chain(graph: TransitionGraph, chain: Chain, held: Sequence[Unit]) -> TransitionGraph:
    chains = (*graph.chains, chain)
    before = replace(graph.before, units=(*graph.before.units, *held))
    return replace(graph, before=before, chains=chains, edges=precedence(chains))


def _timed_by(plans: Mapping[str, ReshardPlan]) -> Seconds:
    """A chain takes as long as its plan says, on the topology that it was made for."""
    return lambda chain: plans[chain.id].seconds() if chain.makes else 0.0


def _operations(
    found: Schedule,
    plans: Mapping[str, ReshardPlan],
    models: Mapping[str, ModelSpec],
    bounded: Collection[str],
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
                orders=_orders(chain, plan, models, bounded) if node.leads else {},
                bytes=0 if plan is None else plan.bytes,
                carrier=None if node.leads else leader.id,
            )


def _ranks(chain: Chain) -> set[Rank]:
    return {rank for unit in (*chain.reads, *chain.ends, *chain.makes) for rank in unit.layout.ranks}


def _orders(
    chain: Chain, plan: ReshardPlan | None, models: Mapping[str, ModelSpec], bounded: Collection[str]
) -> dict[Rank, Order]:
    """What each worker does for a chain: its part of the plan, or dropping a shard where nothing is made."""
    if plan is not None:
        source = chain.reads[0].model_stage if chain.reads else chain.model_stage
        mode: Mode = "bounded" if chain.model_stage in bounded else "shadow"
        stored = None if plan.source == plan.model else plan.source
        return {
            rank: Order(
                source=source,
                target=chain.model_stage,
                model=plan.model,
                plan=plan.rank_plan(rank, mode),
                stored=stored,
            )
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
