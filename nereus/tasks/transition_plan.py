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

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nereus.emu.bounded import Change, choose_together, shadow_bytes
from nereus.emu.chain_time import Seconds
from nereus.emu.chains import Chain
from nereus.emu.far_copies import RUN_BYTES
from nereus.emu.graph import TransitionGraph, build_graph
from nereus.emu.layout import Layout, Rank
from nereus.emu.live_spills import Devices, LiveSpills, needed_spills
from nereus.emu.optimizer_slices import optimizer_stage, seat
from nereus.emu.placement import Placement
from nereus.emu.precedence import precedence
from nereus.emu.reshard import Limits, ReshardPlan
from nereus.emu.schedule import schedule
from nereus.emu.schedule_problem import Room
from nereus.emu.shard_bytes import sizes_of
from nereus.emu.stage import StageSpec
from nereus.emu.target import place_target
from nereus.emu.topology import Topology
from nereus.emu.unit import ClusterState, Unit
from nereus.errors import InvalidOperation, explain
from nereus.tasks.memory_room import MemoryRoom, held_bytes
from nereus.tasks.planned_transition import Stages, Transition, asked_of
from nereus.tasks.stages import GENERATION, TRAINING
from nereus.tasks.whole_move import whole_chain, whole_plan
from nereus.tasks.worker_orders import planned_operations

AMPLE = Room(cap_bytes=1 << 60)


@dataclass(frozen=True, kw_only=True)
class _Ground:
    """What all plans of a transition rest on. Ranks in `lost` died; `stale` are, by model-stage, live ranks
    whose state is of no worth.
    """

    topology: Topology
    limits: Limits | None
    room: Room
    lost: frozenset[Rank]
    stale: dict[str, frozenset[Rank]]

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
    memory: Callable[[Transition], MemoryRoom] | None = None,
) -> Transition:
    """Plan the change. Ranks of new units are permuted among themselves where that moves fewer bytes.

    Ranks in `lost` died; `stale` names, by model-stage, live ones whose state is no source and that are
    filled anew. Where old and new shards do not fit into the `memory` that the workers of such a draft tell
    to have, some model-stages are moved in bounded mode, if need be in two transitions, of which this plans
    the first; where that does not serve, old shards go to host memory first. Raises NoSource or
    InvalidOperation when the state cannot be moved, or when units that share an optimizer would no longer, or
    the other way round; Infeasible when it does not fit into `room`. Nothing has happened then.
    """
    _check_sharing(now, then)
    ranks = {rank for spec in (*now.values(), *then.values()) for rank in spec.ranks}
    ground = _Ground(
        topology=topology or Topology.single_node(1 + max(ranks)),
        limits=limits,
        room=room,
        lost=lost,
        stale=dict(stale or {}),
    )
    draft = _plan(now, then, ground)
    if memory is None or not draft.movers:
        return draft
    room_now, held = memory(draft), held_bytes(now)
    free = {
        rank: max(0, amount - held.get(rank, 0))
        for rank, amount in room_now.state_bytes.items()
        if rank not in lost
    }
    changes = _changes(draft, now, ground, in_parts=room_now.in_parts)
    try:
        moves = choose_together(changes, free)
    except InvalidOperation as tight:
        if not room_now.host_bytes:
            raise
        devices = Devices(
            asked_bytes=shadow_bytes(changes),
            free_bytes=free,
            host_bytes=room_now.host_bytes,
            staging_bytes=_far_staging(draft) if room_now.is_far else {},
        )
        try:
            return _plan(now, then, ground, devices=devices)
        except InvalidOperation as error:
            raise InvalidOperation(f"{error}; without spills: {tight}") from tight
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


def _far_staging(draft: Transition) -> dict[Rank, int]:
    """Bytes of buffers by rank that plans need more where old shards lie on the host."""
    out: Counter[Rank] = Counter()
    for plan in draft.plans.values():
        for rank in plan.ranks:
            part = plan.rank_plan(rank)
            out[rank] += part.far_staging_bytes - part.staging_bytes + RUN_BYTES * bool(part.copies)
    return dict(out)


def _plan(
    now: Stages,
    then: Stages,
    ground: _Ground,
    bounded: Mapping[str, ReshardPlan] | None = None,
    devices: Devices | None = None,
) -> Transition:
    """The transition in which the model-stages of `bounded` are moved by these plans, in bounded mode, and
    old shards go to the hosts where these `devices` lack room.
    """
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
    sizes = sizes_of(models)
    spills: LiveSpills = ()
    if devices is not None:
        stale = ground.stale | {optimizer_stage(name): ranks for name, ranks in ground.stale.items()}
        spills = needed_spills(graph.chains, devices, sizes, stale)
    found = schedule(graph, sizes, ground.room, ground.topology, _timed_by(plans), spills=spills)
    return Transition(
        schedule=found,
        plans=plans,
        operations=tuple(planned_operations(found, plans, models, bounded)),
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


def _changes(draft: Transition, now: Stages, ground: _Ground, *, in_parts: bool) -> dict[str, Change]:
    """What changes, by model-stage. One that had no units before can only move in shadow mode, and so can one
    whose optimizer's state is apart: where units share it, a slice has no second holder. Bounded mode needs
    memory that is freed `in_parts`.
    """
    out: dict[str, Change] = {}
    for name in dict.fromkeys(operation.model_stage for operation in draft.operations):
        own = tuple(plan for chain, plan in draft.plans.items() if chain.partition(":")[0] == name)
        spec = now.get(name)
        whole = None
        can = in_parts and bool(own) and name in draft.in_memory
        if can and spec is not None and spec.shares is None and not spec.apart:
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


def _placed(then: Stages, units: Mapping[str, tuple[Layout, ...]]) -> dict[str, StageSpec]:
    """The model-stages asked for, on the ranks that were chosen."""
    stages = {name: replace(spec, units=units.get(name) or spec.units) for name, spec in then.items()}
    if stages[GENERATION].shares is not None:
        stages[GENERATION] = replace(stages[GENERATION], units=stages[TRAINING].units)
    return stages
