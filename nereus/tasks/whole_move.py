"""A model-stage that is moved by one plan, from all of its old units to all of its new ones. Pure.

Split, Merge, Extend and Destroy speak of whole units. Where that does not serve (units that lost workers, an
optimizer that units share, memory for one shard at a time), the new units are extended, each from whoever
holds a part, and then the units that are left over are destroyed.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.emu.chains import Chain
from nereus.emu.layout import Rank
from nereus.emu.operations import Destroy, Extend
from nereus.emu.placement import Placement
from nereus.emu.reshard import Limits, ReshardPlan, plan_reshard
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import Unit, UnitId


def whole_plan(
    model: ModelSpec,
    old: Sequence[Unit],
    asked: Sequence[Unit],
    *,
    topology: Topology,
    limits: Limits | None = None,
    lost: frozenset[Rank] = frozenset(),
    stale: frozenset[Rank] = frozenset(),
    placement: Placement = "max_overlap",
) -> ReshardPlan:
    """The plan. A unit that is asked for as it was is kept, unless a rank of it is among `lost` or `stale`.

    Raises NoSource when no live rank holds a needed part.
    """
    gone = lost | stale
    sound = {unit.layout: unit for unit in old if not unit.ranks & gone}
    name, first = old[0].model_stage, 1 + max(unit.id.index for unit in old)
    fresh = iter(range(first, first + len(asked)))
    new = [sound.get(unit.layout) or unit.with_id(UnitId(name, next(fresh))) for unit in asked]
    return plan_reshard(
        model, old, new, topology=topology, lost=lost, stale=stale, placement=placement, limits=limits
    )


def whole_chain(plan: ReshardPlan) -> Chain:
    """The chain that such a plan carries: Extend what it makes, then Destroy what it ends."""
    name = plan.old[0].model_stage
    makes = tuple(unit for unit in plan.new if unit not in plan.old)
    ends = tuple(unit for unit in plan.old if unit not in plan.new)
    into = tuple((unit.id, unit.layout) for unit in makes)
    extends = (Extend(sources=tuple(unit.id for unit in plan.old), into=into),) if makes else ()
    return Chain(
        id=f"{name}:whole",
        model_stage=name,
        operations=(*extends, *(Destroy(unit=unit.id) for unit in ends)),
        reads=plan.old if makes else (),
        ends=ends,
        makes=makes,
    )
