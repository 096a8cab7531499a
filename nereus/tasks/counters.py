"""How many optimizer steps the live workers have taken."""

from __future__ import annotations

from nereus.emu.cluster import Call
from nereus.emu.layout import Rank
from nereus.emu.optimizer_slices import optimizer_stage
from nereus.emu.stage import FromMemory, StageSpec
from nereus.tasks.job import Job


def step_counts(job: Job, spec: StageSpec) -> dict[Rank, int]:
    """Optimizer steps that each live rank of a model-stage has taken.

    After a transition that was decided and not yet built these are the counts that it was decided with.
    """
    live = [rank for rank in spec.ranks if rank in job.cluster.ranks]
    if not job.is_built:
        assert isinstance(spec.origin, FromMemory), f"{spec.name} was moved"
        return dict.fromkeys(live, spec.origin.step_count)
    return job.cluster.run(dict.fromkeys(live, Call("step_count", (spec.name,))), what="read counters")


def adam_steps(job: Job) -> dict[str, int]:
    """The newest count of every model-stage that is trained."""
    trained = [spec for spec in job.stages.values() if spec.role == "training"]
    return {spec.name: max(step_counts(job, spec).values(), default=0) for spec in trained}


def stale_states(job: Job) -> dict[str, frozenset[Rank]]:
    """Live ranks, by model-stage, whose state is of no worth: a move that freed its source broke off there,
    or they missed an optimizer step which others took before a failure.

    A death inside the last collective of a step can let one unit finish it and another not. The further state
    is the one to keep: its gradient was complete. A rank that was interrupted inside its update (TORN, below
    all counts) is always stale. Where a shard of generation is missing, all of it is synced from training.
    """
    held = job.cluster.run(dict.fromkeys(job.cluster.ranks, Call("held_states")), what="read what is held")
    stale: dict[str, frozenset[Rank]] = {}
    for spec in job.stages.values():
        if spec.shares is not None:
            continue  # its weights are training's
        keys = {spec.name, *({optimizer_stage(spec.name)} if spec.apart else ())}
        worthless = {rank for rank in spec.ranks if rank in held and not keys <= set(held[rank])}
        if spec.role == "training":
            counts = step_counts(job, spec)
            newest = max([0, *counts.values()])
            worthless |= {rank for rank, count in counts.items() if count < newest}
        if worthless:
            stale[spec.name] = frozenset(worthless)
    return stale
