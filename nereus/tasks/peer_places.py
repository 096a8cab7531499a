"""Where the copies of a trained model lie: on the nodes of its first unit, and on another node. Pure.

Whichever single node is lost, one of the two is left. Both are of one step, so that all models of a job can
go back to it together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.emu.checkpoint.control import Control
from nereus.emu.layout import Layout, Rank
from nereus.emu.stage import StageSpec
from nereus.emu.unit import Unit, UnitId
from nereus.tasks.survive import largest_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A worker that can hold a copy: its rank and its node."""

    rank: Rank
    node: int


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies of every trained model after a step, by model-stage; `control` is the job's state then."""

    control: Control
    units: Mapping[str, tuple[Unit, ...]]

    @property
    def step(self) -> int:
        """Steps that were complete."""
        return self.control.step


def copy_name(model_stage: str) -> str:
    """The key under which a worker holds its shard of a copy."""
    return f"{model_stage}.copy"


def copy_units(spec: StageSpec, places: Sequence[Place]) -> tuple[Unit, ...]:
    """Two copies of a trained model-stage, as units; none where all places are on the nodes of its first
    unit.

    The first lies where the first unit does, so that it costs no transfer; the second on as few other nodes
    as can be, in the same layout if there is room for it, else in the largest smaller one.
    """
    home = spec.units[0]
    nodes: dict[int, list[Rank]] = defaultdict(list)
    for place in sorted(places, key=lambda place: place.rank):
        nodes[place.node].append(place.rank)
    taken = {node for node, ranks in nodes.items() if set(ranks) & set(home.ranks)}
    others = sorted((ranks for node, ranks in nodes.items() if node not in taken), key=len, reverse=True)
    elsewhere = tuple(rank for ranks in others for rank in ranks)
    if not elsewhere:
        return ()
    return tuple(
        Unit(id=UnitId(copy_name(spec.name), index), model=spec.model_name, layout=layout, kinds=spec.kinds)
        for index, layout in enumerate((home, _layout_on(spec, elsewhere)))
    )


def _layout_on(spec: StageSpec, ranks: tuple[Rank, ...]) -> Layout:
    home = spec.units[0]
    if len(ranks) >= home.world_size:
        return home.with_ranks(ranks[: home.world_size])
    return largest_layout(spec, home, ranks)
