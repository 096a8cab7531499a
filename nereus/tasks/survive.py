"""The model-stages on the GPUs that are left: the smallest change of a plan that lost some. Pure.

Units that lost nobody stay as they are; others are made again from the ranks that are free, as many as fit.
Where not even one unit of the old size fits, the largest smaller layout is taken. Units that share an
optimizer (`zero1`) do not survive the loss of one: its slice had no other holder, so the plan to these stages
raises NoSource, and the job goes back to copies in peers' memory or to the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from nereus.emu.engine_limits import check_layout
from nereus.emu.layout import Layout, Rank
from nereus.emu.partition import cut_of
from nereus.emu.stage import StageSpec
from nereus.errors import Infeasible, InvalidLayout, explain
from nereus.tasks.stages import GENERATION, TRAINING


def on_survivors(
    stages: Mapping[str, StageSpec], alive: tuple[Rank, ...], *, apart: bool = False
) -> dict[str, StageSpec]:
    """The stages with all units on `alive`. Raises Infeasible when nobody is left.

    `apart` keeps generation and the others off one another's ranks for as long as both have one left.
    """
    if not alive:
        raise Infeasible(
            explain("cannot go on", values="no worker is left", remedy="run again with --resume")
        )
    generation = frozenset(stages[GENERATION].ranks)
    others = frozenset(rank for name, spec in stages.items() if name != GENERATION for rank in spec.ranks)
    out: dict[str, StageSpec] = {}
    for name, spec in stages.items():
        foreign = (others if name == GENERATION else generation) if apart else frozenset()
        own = tuple(rank for rank in alive if rank not in foreign) or alive
        out[name] = replace(spec, units=surviving_units(spec, own))
    if out[GENERATION].shares is not None:
        out[GENERATION] = replace(out[GENERATION], units=out[TRAINING].units)
    return out


def surviving_units(spec: StageSpec, alive: tuple[Rank, ...]) -> tuple[Layout, ...]:
    """Whole units, then new ones of the same size on the other ranks, at most as many as before."""
    units = spec.units
    whole = [unit for unit in units if set(unit.ranks) <= set(alive) and is_like(unit, units[0])]
    free = [rank for rank in alive if not any(rank in unit.ranks for unit in whole)]
    size = units[0].world_size
    while len(whole) < len(units) and len(free) >= size:
        whole.append(units[0].with_ranks(tuple(free[:size])))
        free = free[size:]
    return tuple(whole) or (largest_layout(spec, units[0], alive),)


def is_like(unit: Layout, other: Layout) -> bool:
    """Whether both are cut alike; not so halfway through a transition in two parts."""
    return cut_of(unit) == cut_of(other)


def largest_layout(spec: StageSpec, unit: Layout, alive: tuple[Rank, ...]) -> Layout:
    """The largest layout of one unit on `alive` that the engine runs, with as much of the old parallelism of
    tensors, of experts and of tokens as possible, in this order.
    """
    model, most = spec.tensors, min(len(alive), unit.world_size)
    sizes = [
        (tp, ep, cp, pp)
        for tp in range(1, unit.tp + 1)
        for ep in range(1, unit.ep + 1)
        for cp in range(1, unit.cp + 1)
        for pp in range(1, model.num_layers + 1)
        if tp * ep * cp * pp <= most
    ]
    for tp, ep, cp, pp in sorted(sizes, key=lambda size: (-prod(size), *(-part for part in size))):
        try:
            layout = Layout.make(model, tp=tp, pp=pp, ep=ep, cp=cp, ranks=alive[: tp * ep * cp * pp])
            check_layout(spec.engine, spec.model, layout)
        except InvalidLayout:
            continue  # the heads forbid this tp, the experts this ep, or the engine one of them
        return layout
    raise AssertionError("one rank can hold every model")
