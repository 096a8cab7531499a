"""The weight sync as a reshard plan: theta only, from the actor's training units to its generation units.
Pure. Where adapters are trained, each rank sends its frozen weights with them added.
"""

from __future__ import annotations

from nereus.emu.kinds import KindMove, serving_kinds, training_kinds
from nereus.emu.layout import Rank
from nereus.emu.mesh_moves import mesh_moves
from nereus.emu.rank_plan import RankPlan
from nereus.emu.reshard import Limits, plan_reshard
from nereus.emu.stage import StageSpec
from nereus.emu.topology import Topology


def plan_weight_sync(
    training: StageSpec, generation: StageSpec, topology: Topology, limits: Limits, *, by_meshes: bool = False
) -> dict[Rank, RankPlan]:
    """Each involved rank's part of the plan. The placement is the configured one.

    `by_meshes`: as moves between meshes. Raises InvalidOperation then, where the plan cannot be moved so.
    """
    kinds = training_kinds(training.model.dtype)
    served = serving_kinds(generation.model.dtype)
    plan = plan_reshard(
        generation.tensors,
        training.elastic_units(kinds, model="actor"),
        generation.elastic_units(served, model="actor"),
        (KindMove(kinds[0], served[0]),),
        topology,
        source=training.served,
        placement="as_given",
        limits=limits,
    )
    if not by_meshes:
        return {rank: plan.rank_plan(rank) for rank in plan.ranks}
    moves, ranks = mesh_moves(plan), tuple(sorted(plan.ranks))
    return {
        rank: RankPlan(
            rank=rank,
            ranks=ranks,
            digest=plan.digest,
            mode="shadow",
            old=plan.old_unit(rank),
            new=plan.new_unit(rank),
            chunks=(),
            meshes=tuple(move for move in moves if rank in move.ranks),
        )
        for rank in ranks
    }
