"""A transition of the running job: from the model-stages as they are to those of another plan, in place.

    plan (pure) ─▶ move and vote ─▶ one decision ─▶ apply ─▶ new generation, engines anew ─▶ publish

Training and inference states move by reshard plans; generation has no state of its own to keep and is synced
from training afterwards. Until the decision the old layout holds, and an abort leaves the job as it was; from
the decision to commit on the new one holds, built or not yet (I6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.emu.ballot import Vote
from nereus.emu.cluster import Call
from nereus.emu.decision import Decision
from nereus.emu.kinds import serving_kinds, training_kinds
from nereus.emu.layout import Rank
from nereus.emu.reshard import ReshardPlan, plan_reshard
from nereus.emu.stage import FromMemory, StageSpec
from nereus.emu.transaction import Order
from nereus.errors import WorkerLost
from nereus.tasks.control import control_record
from nereus.tasks.job import Job, build_stages
from nereus.tasks.stages import GENERATION, TRAINING

DEADLINE_S = 600.0  # of the whole exchange; a dead peer is noticed by its connection, much earlier


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What changes: the reshard plan of every model-stage that moves, and all model-stages as they will
    be.
    """

    plans: Mapping[str, ReshardPlan]
    stages: Mapping[str, StageSpec]

    @property
    def bytes(self) -> int:
        """Bytes that cross between workers, the weight sync that follows not counted."""
        return sum(plan.bytes for plan in self.plans.values())

    @property
    def lower_bound(self) -> int:
        """The least that any transfer to this placement can move."""
        return sum(plan.lower_bound for plan in self.plans.values())

    @property
    def text(self) -> str:
        """The new plan of every model-stage that moves, for people."""
        moved = (f"{name} to {self.stages[name].text}" for name in self.plans)
        return f"moving {', '.join(moved) or 'generation only'} ({self.bytes / 1e6:.1f} MB)"

    def orders(self, rank: Rank) -> tuple[Order, ...]:
        """The worker's part, in one order on all workers."""
        return tuple(
            Order(source=name, target=name, model=plan.model, plan=plan.rank_plan(rank))
            for name, plan in self.plans.items()
            if rank in plan.ranks
        )


def plan_transition(
    now: Mapping[str, StageSpec], then: Mapping[str, StageSpec], *, lost: frozenset[Rank] = frozenset()
) -> Transition:
    """Plan the change. Ranks of new units are permuted among themselves where that moves fewer bytes.

    What the ranks in `lost` hold is no source: they died, or their state is stale.
    Raises NoSource or InvalidOperation when the state cannot be moved; nothing has happened then.
    """
    plans: dict[str, ReshardPlan] = {}
    stages: dict[str, StageSpec] = {}
    for name, spec in then.items():
        untouched = spec.units == now[name].units and not lost & set(spec.ranks)
        if name == GENERATION or untouched:
            stages[name] = spec
            continue
        kinds = (training_kinds if spec.role == "training" else serving_kinds)(spec.model.dtype)
        old, new = now[name].elastic_units(kinds), spec.elastic_units(kinds)
        plan = plan_reshard(spec.tensors, old, new, lost=lost)
        plans[name] = plan
        stages[name] = replace(spec, units=tuple(unit.layout for unit in plan.new))
    generation = stages[GENERATION]
    if generation.shares is not None:
        stages[GENERATION] = replace(generation, units=stages[TRAINING].units)
    return Transition(plans=plans, stages=stages)


@task(name="move and vote", cache_policy=NO_CACHE)
def move_and_vote(job: Job, transition: Transition, epoch: int) -> dict[Rank, Vote]:
    """Build the new shards beside the old ones on every worker that has a part; returns their votes.

    A worker that died has no vote, which counts as a no.
    """
    with job.stage("move and vote"):
        orders = {rank: transition.orders(rank) for rank in job.cluster.ranks}
        calls = {
            rank: Call("prepare_transition", (epoch, mine, DEADLINE_S))
            for rank, mine in orders.items()
            if mine
        }
        try:
            return job.cluster.run(calls, what="move and vote")
        except WorkerLost:
            return {}


@task(name="decide", cache_policy=NO_CACHE)
def decide(
    job: Job, transition: Transition, epoch: int, votes: Mapping[Rank, Vote], counts: Mapping[str, int]
) -> Decision:
    """Write the one decision; where it is commit, the job's model-stages are the new ones from here on.

    `counts` are Adam's, by model-stage. Asks no worker, so nobody's death comes between votes and decision.
    """
    control = control_record(job, counts)
    decision = job.cluster.coordinator.decide(epoch, _movers(job, transition), votes, control.to_json())
    if decision.commits:
        job.is_built = False
        job.stages = {
            name: spec
            if name == GENERATION
            else replace(spec, origin=FromMemory(step_count=counts.get(name, 0)))
            for name, spec in transition.stages.items()
        }
    return decision


@task(name="apply", cache_policy=NO_CACHE)
def apply(job: Job, transition: Transition, decision: Decision) -> None:
    """Let every worker that has a part act on the decision; all that live do, also when one is lost."""
    calls = dict.fromkeys(_movers(job, transition), Call("apply_decision", (decision,)))
    job.cluster.run(calls, what="apply")


def _movers(job: Job, transition: Transition) -> list[Rank]:
    return [rank for rank in job.cluster.ranks if transition.orders(rank)]


@task(name="rebuild", cache_policy=NO_CACHE)
def rebuild(job: Job) -> None:
    """A new generation of the world, engines around the moved shards, and a weight sync."""
    with job.stage("rebuild"):
        job.cluster.join()
        job.weight_sync = build_stages(job.cluster, job.stages)
        job.is_built = True
