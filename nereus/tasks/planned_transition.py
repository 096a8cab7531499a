"""A transition as planned: operations in a certified order, what they move, and what holds afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.emu.graph import TransitionGraph
from nereus.emu.layout import Layout, Rank
from nereus.emu.orders import Order, SpillOrder
from nereus.emu.reshard import ReshardPlan
from nereus.emu.schedule import Schedule
from nereus.emu.stage import StageSpec

Stages = Mapping[str, StageSpec]
Asked = frozenset[tuple[str, tuple[Layout, ...]]]


@dataclass(frozen=True, kw_only=True)
class PlannedOperation:
    """One operation of the graph. `after` are the ids of those it waits for.

    `orders` say what each worker that takes part has to do; they are empty where the operation `carrier` of
    the same chain moves the bytes, so that `bytes` is 0; those of a spill go to host memory. `ranks` are the
    GPUs whose units it touches.
    """

    id: str
    kind: str
    model_stage: str
    text: str
    after: tuple[str, ...]
    ranks: tuple[Rank, ...]
    orders: Mapping[Rank, Order | SpillOrder]
    bytes: int
    carrier: str | None = None


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What changes: operations in the order of the schedule, predecessors first, and all model-stages after.

    `plans` are the reshard plans by chain; `in_memory` are the model-stages whose state lies in the workers
    after the commit, the others are synced, or read from their folders; `asked` is the plan before ranks were
    permuted. Model-stages in `bounded` are moved after the decision, freeing what has moved. A transition
    that is `halfway` leads to units from which another one leads on to the plan; nothing is built in between.
    """

    schedule: Schedule
    plans: Mapping[str, ReshardPlan]
    operations: tuple[PlannedOperation, ...]
    stages: Stages
    in_memory: frozenset[str]
    asked: Asked
    bounded: frozenset[str] = frozenset()
    halfway: bool = False

    @property
    def graph(self) -> TransitionGraph:
        """The operations and who waits for whom."""
        return self.schedule.graph

    @property
    def movers(self) -> tuple[Rank, ...]:
        """The workers that have a part."""
        return tuple(sorted({rank for operation in self.operations for rank in operation.orders}))

    @property
    def bytes(self) -> int:
        """Bytes that cross between workers, a weight sync that follows not counted."""
        return sum(plan.bytes for plan in self.plans.values())

    @property
    def spilled_bytes(self) -> int:
        """Bytes that go to host memory until the decision."""
        return self.schedule.spilled_bytes

    @property
    def lower_bound(self) -> int:
        """The least that any transfer to this placement can move."""
        return sum(plan.lower_bound for plan in self.plans.values())

    @property
    def text(self) -> str:
        """The new plan of every model-stage that moves, for people."""
        moved = dict.fromkeys(operation.model_stage for operation in self.operations)
        named = (f"{name} to {self.stages[name].text}" for name in moved if name in self.stages)
        spilled = f", {self.spilled_bytes / 1e6:.1f} MB by way of the host" if self.spilled_bytes else ""
        return f"moving {', '.join(named) or 'generation only'} ({self.bytes / 1e6:.1f} MB{spilled})"


def asked_of(stages: Stages) -> Asked:
    """A plan by what tells it from others: the units of every model-stage."""
    return frozenset((name, spec.units) for name, spec in stages.items())
