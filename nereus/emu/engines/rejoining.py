"""Engines that outlive a change of the world, because they are dear to make.

A transition puts every worker into a new generation of the world, whose groups are new. An engine whose own
groups do not end with the old generation goes on where its unit is the same before and after:

    driver ── build(model-stage) ──▶ each rank of a unit: was my engine made for this? ──▶ all say yes: rejoin
                                                                                     └──▶ else: made anew
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups


@runtime_checkable
class RejoiningEngine(Protocol):
    """A `GenerateEngine` that can go on in another generation of the world."""

    def rejoin(self, groups: UnitGroups) -> None:
        """Take the unit's groups of the new generation; its layout is the one that the engine was made for.

        The weights are pushed anew afterwards, as into an engine that was just made.
        """
        ...


def made_alike(old: StageSpec, new: StageSpec, rank: Rank) -> bool:
    """Whether an engine that was made on this rank for `old` is what `new` asks for: other units of the
    model-stage do not matter.
    """

    def asked(spec: StageSpec) -> tuple[object, ...]:
        mine = [unit for unit in spec.units if rank in unit.ranks]
        return spec.engine, spec.model, spec.serving, spec.shares, mine

    return asked(old) == asked(new)


def agreed(mine: bool, groups: UnitGroups, device: torch.device) -> bool:
    """Whether all ranks of the unit say yes. Collective over the unit."""
    if groups.unit is None:
        return mine
    yes = torch.tensor(int(mine), device=device)
    dist.all_reduce(yes, op=dist.ReduceOp.MIN, group=groups.unit)
    return bool(yes)
