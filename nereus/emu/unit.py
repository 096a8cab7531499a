"""The elastic model unit and the cluster state: the set of live units over the cluster's ranks.

A unit is one data-parallel replica of a model-stage: a layout on explicit ranks, with theta and, for
training, omega (optimizer state). Data parallelism is the number of units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nereus.emu.kinds import Kinds
from nereus.emu.layout import Layout, Rank
from nereus.errors import InvalidOperation, explain


@dataclass(frozen=True, slots=True, order=True)
class UnitId:
    """Name of a unit: the model-stage (`actor.training`) and a number unique within it."""

    model_stage: str
    index: int

    def __str__(self) -> str:
        return f"{self.model_stage}#{self.index}"

    @property
    def stage(self) -> str:
        """`generation`, `inference` or `training`."""
        return self.model_stage.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One replica: `<model-stage, layout, ranks, theta, omega>`. `model` is the key of its ModelSpec."""

    id: UnitId
    model: str
    layout: Layout
    kinds: Kinds

    @property
    def model_stage(self) -> str:
        """The model-stage this unit is a replica of."""
        return self.id.model_stage

    @property
    def ranks(self) -> frozenset[Rank]:
        """The ranks of the unit as a set; `layout.ranks` has them in layout order."""
        return frozenset(self.layout.ranks)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one logical element over all kinds."""
        return sum(kind.num_bytes for kind in self.kinds)

    def with_layout(self, layout: Layout) -> Unit:
        """The same unit under another layout."""
        return Unit(id=self.id, model=self.model, layout=layout, kinds=self.kinds)

    def with_id(self, unit_id: UnitId) -> Unit:
        """The same replica under another name."""
        return Unit(id=unit_id, model=self.model, layout=self.layout, kinds=self.kinds)

    def __str__(self) -> str:
        layout = self.layout
        return f"{self.id} {layout.sizes_text} on {list(layout.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All live units, sorted by id, and all ranks of the cluster.

    Units of different stages take turns on a rank; units of one stage run at the same time. Hence I1: within
    a stage every rank belongs to exactly one live unit or is free. Build with `of`, which checks it.
    """

    units: tuple[Unit, ...]
    ranks: frozenset[Rank]

    @classmethod
    def of(cls, units: Iterable[Unit], ranks: Iterable[Rank]) -> ClusterState:
        """Build and check a state. Raises InvalidOperation when I1 is broken or an id is taken twice."""
        state = cls(units=tuple(sorted(units, key=lambda unit: unit.id)), ranks=frozenset(ranks))
        state._check()
        return state

    def _check(self) -> None:
        owner: dict[tuple[str, Rank], UnitId] = {}
        seen: set[UnitId] = set()
        for unit in self.units:
            if unit.id in seen:
                raise _broken(f"unit {unit.id} appears twice", "unit ids are unique", "choose a fresh index")
            seen.add(unit.id)
            if strangers := sorted(unit.ranks - self.ranks):
                raise _broken(
                    f"unit {unit.id} lies on ranks {strangers} outside the cluster",
                    "I1: every rank of a unit is a rank of the cluster",
                    "add the ranks to the cluster first",
                )
            for rank in unit.layout.ranks:
                other = owner.setdefault((unit.id.stage, rank), unit.id)
                if other != unit.id:
                    raise _broken(
                        f"rank {rank} belongs to {other} and to {unit.id}",
                        f"I1: within the {unit.id.stage} stage a rank belongs to one unit or is free",
                        "destroy or move one of the two first",
                    )

    def unit(self, unit_id: UnitId) -> Unit:
        """The live unit of that name. Raises InvalidOperation when there is none."""
        for unit in self.units:
            if unit.id == unit_id:
                return unit
        raise _broken(
            f"no unit {unit_id}",
            f"live units are {', '.join(str(unit.id) for unit in self.units) or 'none'}",
            "name a live unit",
        )

    def replicas(self, model_stage: str) -> tuple[Unit, ...]:
        """The units of a model-stage, sorted by id; their number is its dp."""
        return tuple(unit for unit in self.units if unit.model_stage == model_stage)

    def free(self, stage: str) -> frozenset[Rank]:
        """Ranks that no unit of this stage uses."""
        used = {rank for unit in self.units if unit.id.stage == stage for rank in unit.layout.ranks}
        return self.ranks - used

    @property
    def idle(self) -> frozenset[Rank]:
        """Ranks that no unit at all uses."""
        return self.ranks - {rank for unit in self.units for rank in unit.layout.ranks}

    def next_id(self, model_stage: str) -> UnitId:
        """The lowest name above every one in use for the model-stage."""
        return UnitId(
            model_stage, max((unit.id.index for unit in self.replicas(model_stage)), default=-1) + 1
        )

    def with_units(self, *units: Unit) -> ClusterState:
        """The state with these units added. Raises InvalidOperation when I1 would break."""
        return ClusterState.of((*self.units, *units), self.ranks)

    def without(self, *unit_ids: UnitId) -> ClusterState:
        """The state with these units gone and their ranks free. Raises InvalidOperation for a stranger."""
        gone = {self.unit(unit_id).id for unit_id in unit_ids}
        return ClusterState.of((unit for unit in self.units if unit.id not in gone), self.ranks)

    def with_ranks(self, ranks: Iterable[Rank]) -> ClusterState:
        """The state with these ranks joined, free in every stage."""
        return ClusterState.of(self.units, self.ranks | frozenset(ranks))

    def without_ranks(self, ranks: Iterable[Rank]) -> ClusterState:
        """The state after these ranks left. Raises InvalidOperation while a unit lies on one of them."""
        return ClusterState.of(self.units, self.ranks - frozenset(ranks))


def _broken(values: str, rule: str, remedy: str) -> InvalidOperation:
    return InvalidOperation(explain("cannot form the cluster state", values=values, rule=rule, remedy=remedy))
