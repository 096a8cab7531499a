"""The four operations on units. Each is a value; `apply` gives the next cluster state or refuses.

```
Split    one unit  ──▶ several on the same ranks        every part a full replica
Merge    units     ──▶ one on the same ranks            of one unit: its layout changes in place
Extend   units stay, new replicas appear on free ranks  copies of what the sources hold
Destroy  one unit  ──▶ its ranks become free            never the last holder of a model's state
```
`reshard_units` are the old and new units that `plan_reshard` takes; a Destroy moves nothing.
No operation changes the set of ranks of the cluster (I2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.emu.kinds import Kinds
from nereus.emu.layout import Layout, Rank
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.errors import InvalidOperation, explain

Place = tuple[UnitId, Layout]
Units = tuple[Unit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Divide one unit into several that share no rank and together take all of its ranks."""

    unit: UnitId
    into: tuple[Place, ...]

    def apply(self, state: ClusterState) -> ClusterState:
        """The state after the split. Raises InvalidOperation when the parts do not make up the unit."""
        old, new = self.reshard_units(state)
        return state.without(*(unit.id for unit in old)).with_units(*new)

    def reshard_units(self, state: ClusterState) -> tuple[Units, Units]:
        """The unit, and its parts."""
        attempt = f"cannot split {self.unit}"
        unit = state.unit(self.unit)
        if len(self.into) < 2:
            raise _refused(
                attempt,
                f"{len(self.into)} parts",
                "a split makes at least two units",
                "use Merge of the one unit to change its layout in place",
            )
        _same_stage(attempt, unit, self.into)
        _covers(attempt, unit.ranks, self.into)
        return (unit,), tuple(_replica(unit, place) for place in self.into)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Join replicas into one unit on exactly their ranks; with one replica, change its layout in place."""

    units: tuple[UnitId, ...]
    into: Place

    def apply(self, state: ClusterState) -> ClusterState:
        """The state after the merge. Raises InvalidOperation when the units are not replicas."""
        old, new = self.reshard_units(state)
        return state.without(*(unit.id for unit in old)).with_units(*new)

    def reshard_units(self, state: ClusterState) -> tuple[Units, Units]:
        """The replicas, and the unit they become."""
        attempt = f"cannot merge {', '.join(map(str, self.units)) or 'nothing'}"
        if not self.units or len(set(self.units)) < len(self.units):
            raise _refused(
                attempt,
                f"units {[str(unit) for unit in self.units]}",
                "a merge takes one or more distinct units",
                "name every unit once",
            )
        old = tuple(state.unit(unit) for unit in self.units)
        _replicas(attempt, old)
        _same_stage(attempt, old[0], (self.into,))
        _covers(attempt, frozenset(rank for unit in old for rank in unit.layout.ranks), (self.into,))
        if len(old) == 1 and old[0].layout == self.into[1]:
            raise _refused(
                attempt, f"layout {old[0]}", "a merge of one unit changes its layout", "leave the unit alone"
            )
        return old, (_replica(old[0], self.into),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Make new replicas on free ranks from `sources`, which stay as they are.

    `kinds` of the new units default to those of the sources; a part of them (weights alone) makes serving
    units out of training units.
    """

    sources: tuple[UnitId, ...]
    into: tuple[Place, ...]
    kinds: Kinds | None = None

    def apply(self, state: ClusterState) -> ClusterState:
        """The state with the new units. Raises InvalidOperation when their ranks are not free."""
        old, new = self.reshard_units(state)
        return state.with_units(*(unit for unit in new if unit not in old))

    def reshard_units(self, state: ClusterState) -> tuple[Units, Units]:
        """The sources; the sources again, which keep their storage, and the new units."""
        attempt = f"cannot extend {', '.join(map(str, self.sources)) or 'nothing'}"
        if not self.sources or not self.into:
            raise _refused(
                attempt,
                f"{len(self.sources)} sources, {len(self.into)} new units",
                "an extension needs a source and a new unit",
                "load a checkpoint to start from nothing",
            )
        old = tuple(state.unit(unit) for unit in self.sources)
        _replicas(attempt, old)
        kinds = old[0].kinds if self.kinds is None else self.kinds
        if absent := {kind.name for kind in kinds} - {kind.name for kind in old[0].kinds}:
            raise _refused(
                attempt,
                f"kinds {sorted(absent)} are not in {old[0].id}",
                "every kind of a new unit comes from its sources",
                "extend from training units",
            )
        new = tuple(
            Unit(id=unit_id, model=old[0].model, layout=layout, kinds=kinds) for unit_id, layout in self.into
        )
        for unit in new:
            if taken := sorted(unit.ranks - state.free(unit.id.stage)):
                raise _refused(
                    attempt,
                    f"new unit {unit.id} on ranks {taken}",
                    f"a new unit takes free ranks of the {unit.id.stage} stage: "
                    f"{sorted(state.free(unit.id.stage))}",
                    "destroy what lies there first",
                )
        return old, (*old, *new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destroy:
    """Free the ranks of a unit."""

    unit: UnitId

    def apply(self, state: ClusterState) -> ClusterState:
        """The state without the unit. Raises InvalidOperation when it is the last to hold some kind."""
        unit = state.unit(self.unit)
        others = [other for other in state.units if other.model == unit.model and other.id != unit.id]
        held = {kind.name for other in others for kind in other.kinds}
        if lost := [kind.name for kind in unit.kinds if kind.name not in held]:
            raise _refused(
                f"cannot destroy {self.unit}",
                f"it alone holds {', '.join(lost)} of {unit.model}",
                "the last holder of a model's state must live",
                "extend it elsewhere first, or end the campaign, which checkpoints it",
            )
        return state.without(self.unit)

    def reshard_units(self, state: ClusterState) -> tuple[Units, Units]:
        """Nothing moves."""
        return (), ()


Operation = Split | Merge | Extend | Destroy


def apply_all(state: ClusterState, operations: Sequence[Operation]) -> ClusterState:
    """The state after all operations in order. Raises InvalidOperation at the first that is not allowed."""
    for operation in operations:
        before = state.ranks
        state = operation.apply(state)
        assert state.ranks == before, f"I2: {sorted(state.ranks ^ before)}"
    return state


def _replica(unit: Unit, place: Place) -> Unit:
    unit_id, layout = place
    return Unit(id=unit_id, model=unit.model, layout=layout, kinds=unit.kinds)


def _same_stage(attempt: str, unit: Unit, into: Sequence[Place]) -> None:
    for unit_id, _ in into:
        if unit_id.model_stage != unit.model_stage:
            raise _refused(
                attempt,
                f"{unit_id} is not of {unit.model_stage}",
                "a unit stays in its model-stage",
                "use Extend to make units of another stage",
            )


def _replicas(attempt: str, units: Units) -> None:
    first = units[0]
    for unit in units[1:]:
        if (unit.model, unit.model_stage, unit.kinds) != (first.model, first.model_stage, first.kinds):
            raise _refused(
                attempt,
                f"{unit.id} and {first.id}",
                "the units must be replicas: one model, one model-stage, equal kinds",
                "name units of one model-stage",
            )


def _covers(attempt: str, ranks: frozenset[Rank], into: Sequence[Place]) -> None:
    taken = [rank for _, layout in into for rank in layout.ranks]
    if len(set(taken)) < len(taken) or set(taken) != ranks:
        raise _refused(
            attempt,
            f"ranks {sorted(ranks)} become {sorted(taken)}",
            "the results take every rank of the old units exactly once",
            "free a rank by Destroy and add one by Extend",
        )


def _refused(attempt: str, values: str, rule: str, remedy: str) -> InvalidOperation:
    return InvalidOperation(explain(attempt, values=values, rule=rule, remedy=remedy))
