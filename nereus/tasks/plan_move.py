"""A transition planned for a running job: over its nodes and links, within the memory of its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.tasks.device import device
from nereus.tasks.job import Job
from nereus.tasks.memory_room import MemoryRoom, memory_room
from nereus.tasks.planned_transition import Transition
from nereus.tasks.topology import limits_on, topology_of
from nereus.tasks.transition_plan import plan_transition


def plan_move(
    job: Job,
    then: Mapping[str, StageSpec],
    *,
    stale: Mapping[str, frozenset[Rank]] | None = None,
    before_asking: Callable[[Transition], None] = lambda draft: None,
) -> Transition:
    """Plan the way from the job's model-stages to `then`; see `plan_transition` for `stale` and errors.

    Workers that are gone are no source. Those that have a part are asked for their room; `before_asking` is
    given what is planned without. Raises WorkerLost when one dies while it is asked.
    """

    def room_of(draft: Transition) -> MemoryRoom:
        before_asking(draft)
        return memory_room(job, draft.movers)

    held = {rank for spec in job.stages.values() for rank in spec.ranks}
    on = device(job.config)
    return plan_transition(
        job.stages,
        then,
        lost=frozenset(held - set(job.cluster.ranks)),
        stale=stale,
        topology=topology_of(job.cluster.pool(), job.stages, device=on),
        limits=limits_on(on),
        memory=room_of,
    )
