"""Copies of the trained models in the memory of peers, and the way back to them.

    every few steps      units ─ reshard plan ─▶ copies on two nodes             one transaction
    last replica lost    copies that live ─ reshard plan ─▶ units on who is left, at the copies' step

Copies lie in the workers that hold them beside whatever else those hold, and outlive transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.emu.ballot import Vote
from nereus.emu.cluster import Call
from nereus.emu.decision import Decision
from nereus.emu.layout import Rank
from nereus.emu.optimizer_slices import optimizer_stage
from nereus.emu.orders import Order
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.stage import FromMemory, StageSpec
from nereus.emu.unit import Unit
from nereus.errors import NoSource, WorkerLost
from nereus.tasks.control import control_record
from nereus.tasks.counters import adam_steps
from nereus.tasks.device import device
from nereus.tasks.job import Job, build_stages, state_of
from nereus.tasks.length_history import LengthHistory
from nereus.tasks.peer_places import Copies, Place, copy_name, copy_units
from nereus.tasks.resume import MODEL_OF_STAGE, newest_checkpoint
from nereus.tasks.stages import GENERATION, TRAINING

DEADLINE_S = 300.0  # far above any copy; a dead peer is noticed by its connection, much earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One state that becomes another, by the keys under which workers hold them."""

    source: str
    target: str
    plan: ReshardPlan


@task(name="copy to peers", cache_policy=NO_CACHE)
def copy_to_peers(job: Job) -> None:
    """Copy every trained model to workers of two nodes; an earlier copy is dropped once the new one is whole.

    Says so and does nothing where a model has no second node.
    Raises WorkerLost when a worker dies on the way; the earlier copies then stay.
    """
    places = [Place(rank=gpu.rank, node=gpu.node) for gpu in job.cluster.pool() if gpu.drain_at_s is None]
    trained = [spec for spec in job.stages.values() if spec.role == "training"]
    units = {spec.name: copy_units(spec, places) for spec in trained}
    if without := [spec.name for spec in trained if not units[spec.name]]:
        job.listener.on_message(f"step {job.state.step}: no copy on a peer, there is no place for {without}")
        return
    control = control_record(job, adam_steps(job))
    with job.stage("copy to peers"):
        moves = [move for spec in trained for move in moves_away(spec, units[spec.name])]
        decision = _carry_out(job, moves, control.to_json())
        if decision.commits:
            # The lengths stay with the driver: workers have no use for them.
            control = replace(control, prompt_lengths=job.lengths.means)
            before, job.copies = job.copies, Copies(control=control, units=units)
            _drop(job, before)
        else:
            job.listener.on_message(f"step {job.state.step}: no copy on a peer: {decision.reason}")


def moves_away(spec: StageSpec, copies: Sequence[Unit]) -> list[Move]:
    """From the units to the copies: one state, or weights and optimizer where that is apart."""
    plan = plan_reshard(spec.tensors, spec.elastic_units(spec.kinds), copies, placement="as_given")
    moves = [Move(source=spec.name, target=copy_name(spec.name), plan=plan)]
    if spec.apart:
        omega = _omega_copies(spec, copies)
        plan = plan_reshard(spec.trained, spec.optimizer_units, omega, placement="as_given")
        name = optimizer_stage(copy_name(spec.name))
        moves.append(Move(source=optimizer_stage(spec.name), target=name, plan=plan))
    return moves


def _omega_copies(spec: StageSpec, copies: Sequence[Unit]) -> tuple[Unit, ...]:
    return spec.optimizer_units_on([unit.layout for unit in copies], copy_name(spec.name))


def go_back_to_copies(job: Job, then: Mapping[str, StageSpec]) -> bool:
    """Build the model-stages of `then` from the copies, where those are newer than the newest checkpoint and
    whole; whether it was done.

    The job's state and its record go back to the copies' step. Raises WorkerLost when another worker dies on
    the way; the copies are still there.
    """
    copies, stored = job.copies, newest_checkpoint(job.config)
    if copies is None or (stored is not None and stored.control.step >= copies.step):
        return False
    try:
        moves = _way_back(job, then, copies)
    except NoSource as error:
        job.listener.on_message(f"the copies on peers are not whole: {error}")
        return False
    decision = _carry_out(job, moves, copies.control.to_json())
    if not decision.commits:
        job.listener.on_message(f"cannot go back to the copies: {decision.reason}")
        return False
    plans = {move.target: move.plan for move in moves if move.target in then}
    stages = _stages_at(job, then, plans, copies)
    job.cluster.join()
    job.weight_sync = build_stages(job.cluster, stages, device=device(job.config))
    job.stages, job.is_built = stages, True
    job.adam_steps = {name: _steps_of(copies, name) for name in copies.units}
    job.state, job.tried = state_of(copies.control), -1
    job.lengths = LengthHistory.of(copies.control.prompt_lengths)
    job.log.rewind(job.state.step)
    return True


def _way_back(job: Job, then: Mapping[str, StageSpec], copies: Copies) -> list[Move]:
    held = {rank for units in copies.units.values() for unit in units for rank in unit.ranks}
    dead = frozenset(held) - set(job.cluster.ranks)
    return [move for name, units in copies.units.items() for move in moves_back(then[name], units, dead)]


def moves_back(spec: StageSpec, copies: Sequence[Unit], dead: frozenset[Rank]) -> list[Move]:
    """From the copies that live to the units of `spec`. Raises NoSource when no whole one is left."""
    new = spec.elastic_units(spec.kinds)
    plan = plan_reshard(spec.tensors, copies, new, lost=dead)
    moves = [Move(source=copy_name(spec.name), target=spec.name, plan=plan)]
    if spec.apart:
        omega = replace(spec, units=tuple(unit.layout for unit in plan.new)).optimizer_units
        old = _omega_copies(spec, copies)
        plan = plan_reshard(spec.trained, old, omega, lost=dead, placement="as_given")
        name = optimizer_stage(copy_name(spec.name))
        moves.append(Move(source=name, target=optimizer_stage(spec.name), plan=plan))
    return moves


def _stages_at(
    job: Job, then: Mapping[str, StageSpec], plans: Mapping[str, ReshardPlan], copies: Copies
) -> dict[str, StageSpec]:
    """Trained models from memory; what is never trained from its folder; generation by a weight sync."""
    first = job.prepared.stages_at(job.state.step)
    stages = {name: replace(spec, origin=first[name].origin) for name, spec in then.items()}
    for name, plan in plans.items():
        origin = FromMemory(step_count=_steps_of(copies, name))
        stages[name] = replace(stages[name], units=tuple(unit.layout for unit in plan.new), origin=origin)
    if stages[GENERATION].shares is not None:
        stages[GENERATION] = replace(stages[GENERATION], units=stages[TRAINING].units)
    return stages


def _steps_of(copies: Copies, name: str) -> int:
    return copies.control.optimizers[MODEL_OF_STAGE[name]].adam_steps


def _carry_out(job: Job, moves: Sequence[Move], control: str) -> Decision:
    """The moves as one transaction. Raises WorkerLost when a worker died; it was aborted then."""
    cluster, epoch = job.cluster, job.cluster.next_epoch()
    movers = sorted({rank for move in moves for rank in move.plan.ranks} & set(cluster.ranks))
    votes: dict[Rank, Vote] = {}
    try:
        cluster.run(dict.fromkeys(movers, Call("begin_transition", (epoch,))), what="copy")
        for move in moves:
            cluster.run(_orders(move, movers), what="copy")
        votes = cluster.run(dict.fromkeys(movers, Call("vote")), what="copy")
    except WorkerLost as error:
        decision = cluster.coordinator.abort(epoch, str(error))
    else:
        decision = cluster.coordinator.decide(epoch, movers, votes, control)
    cluster.run(dict.fromkeys(movers, Call("apply_decision", (decision,))), what="copy")
    return decision


def _orders(move: Move, movers: Sequence[Rank]) -> dict[Rank, Call]:
    plan = move.plan
    return {
        rank: Call(
            "prepare_operation",
            (
                Order(source=move.source, target=move.target, model=plan.model, plan=plan.rank_plan(rank)),
                DEADLINE_S,
            ),
        )
        for rank in movers
        if rank in plan.ranks
    }


def _drop(job: Job, before: Copies | None) -> None:
    """Free the shards of earlier copies in workers that have no part in the new ones."""
    assert job.copies is not None, "new copies come first"
    if before is None:
        return
    for name, units in before.units.items():
        kept = {rank for unit in job.copies.units.get(name, ()) for rank in unit.ranks}
        held = {rank for unit in units for rank in unit.ranks} & set(job.cluster.ranks)
        for key in (copy_name(name), optimizer_stage(copy_name(name))):
            call = Call("drop", (key,))
            job.cluster.run(dict.fromkeys(sorted(held - kept), call), what="copy")
