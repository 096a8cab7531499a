"""A chain: operations of one model-stage that happen as one, and the reshard plan that carries their bytes.

It is closed: every unit that it reads either stays as it is or ends with it. Hence its bytes move by one
plan from old units to new ones, whatever units appear on paper between its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nereus.emu.operations import Operation, Units
from nereus.emu.reshard import Limits, ReshardPlan, plan_reshard
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology


class Chain(NamedTuple):
    """Operations of one model-stage that happen as one move, in the order Split, Destroy, Extend, Merge.

    `reads` are the old units that hold its bytes, `ends` those whose storage is freed when it is done,
    `makes` the new ones. A unit that alone holds its state and moves to other ranks is extended first and
    destroyed last: no other order keeps a holder alive.
    """

    id: str
    model_stage: str
    operations: tuple[Operation, ...]
    reads: Units
    ends: Units
    makes: Units

    @property
    def model(self) -> str:
        """The key of its model."""
        return (self.makes or self.ends)[0].model

    @property
    def stays(self) -> Units:
        """Units of the model-stage that it reads and leaves as they are."""
        stage, ended = self.model_stage, {unit.id for unit in self.ends}
        return tuple(u for u in self.reads if u.id not in ended and u.model_stage == stage)

    def reshard_plan(
        self,
        models: Mapping[str, ModelSpec],
        topology: Topology | None = None,
        *,
        limits: Limits | None = None,
    ) -> ReshardPlan | None:
        """The plan that carries all bytes of the chain, None where nothing is made."""
        if not self.makes:
            return None
        new = (*self.stays, *self.makes)
        model = models[self.model]
        return plan_reshard(model, self.reads, new, topology=topology, placement="as_given", limits=limits)
