"""What of a transition a job stands still for, where generation runs beside training. Pure.

    turns   generation ─▶ training ─▶ |move, new world|                       all of it
    rests   sync ─▶ |move, new world| ─▶ both go on                           all of it
    beside  sync ─▶ |move beside a batch ─▶ boundary| new world| learn alone  the overlap of a step, new world

A new world needs all workers, so even a move that leaves generation alone ends at a boundary of generation.
Where that comes with the end of a batch only, the batch is whole when training goes on, and training then
learns with nothing beside it: the bound on staleness lets no further batch begin. Keeping generation at rest
from a weight sync on is then the cheaper way for every move that is shorter than the stages it would hide
behind. With segments a boundary is near; generation draws on while training moves, and what training would
have waited for responses anyway costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nereus.planner.plan import Plan
from nereus.planner.transition_time import TransitionCost
from nereus.planner.workload import Stage


class Way(StrEnum):
    """When a transition is carried out, and what generation does meanwhile."""

    AT_ONCE = "at once"
    """Generation rests at its next boundary; it does anyway where stages take turns."""
    AT_SYNC = "at a weight sync"
    """Generation is kept at rest from there on. That is one to come where it has gone on since the last."""
    BESIDE = "beside generation"
    """Generation draws on while training moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Seconds that steps become longer by, this way."""

    seconds: float
    way: Way


def standstill(cost: TransitionCost, plan: Plan, *, moves_generation: bool, in_segments: bool) -> Standstill:
    """The cheaper way to carry out a transition away from `plan`.

    `moves_generation`: units of generation change. `in_segments`: generation has a boundary within a batch.
    """
    if not plan.schedule.overlaps:
        return Standstill(seconds=cost.seconds, way=Way.AT_ONCE)
    if moves_generation or cost.from_checkpoint is not None:
        return Standstill(seconds=cost.seconds, way=Way.AT_ONCE if in_segments else Way.AT_SYNC)
    generation_s = plan.stage_s.get(Stage.GENERATION, 0.0)
    consumer_s = plan.stage_s.get(Stage.INFERENCE, 0.0) + plan.stage_s.get(Stage.TRAINING, 0.0)
    moving_s = cost.moving_s + cost.reading_s
    if in_segments:
        idle_s = max(0.0, generation_s - consumer_s)
        return Standstill(seconds=cost.fixed_s + max(0.0, moving_s - idle_s), way=Way.BESIDE)
    beside_s = cost.fixed_s + max(moving_s, generation_s) + consumer_s - max(generation_s, consumer_s)
    if beside_s < cost.seconds:
        return Standstill(seconds=beside_s, way=Way.BESIDE)
    return Standstill(seconds=cost.seconds, way=Way.AT_SYNC)
