"""The target state with its new units on the ranks where most of their bytes already lie."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.emu.partition import cut_of, partition
from nereus.emu.placement import place
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Topology
from nereus.emu.unit import ClusterState, Unit


def place_target(
    before: ClusterState, target: ClusterState, models: Mapping[str, ModelSpec], topology: Topology
) -> ClusterState:
    """The target with the ranks of each model-stage's changed units permuted among themselves.

    Units that stay as they are keep their ranks. Solves an assignment problem for every model-stage.
    """
    units: list[Unit] = []
    for model_stage in sorted({unit.model_stage for unit in target.units}):
        old, new = before.replicas(model_stage), target.replicas(model_stage)
        layouts = {unit.layout for unit in old}
        kept = [unit for unit in new if unit.layout in layouts]
        moved = [unit for unit in new if unit.layout not in layouts]
        units += kept
        if not old or not moved:
            units += moved
            continue
        cuts = tuple(sorted({cut_of(unit.layout) for unit in (*old, *moved)}))
        units += place(partition(models[moved[0].model], cuts), old, moved, topology)
    return ClusterState(units=tuple(sorted(units, key=lambda unit: unit.id)), ranks=target.ranks)
