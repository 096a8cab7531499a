"""The weight sync's plan: an exchange, or moves between meshes where generation has GPUs of its own."""

from __future__ import annotations

import pytest

from nereus.emu.reshard import Limits
from nereus.emu.topology import Topology
from nereus.errors import InvalidOperation
from nereus.tasks.stages import GENERATION, TRAINING
from nereus.tasks.weight_sync import plan_weight_sync
from tests.tasks.test_transition_plan import SPEC, stage

TOPOLOGY = Topology.single_node(8)


def test_meshes_take_the_place_of_rounds_on_every_rank() -> None:
    training, generation = stage(TRAINING, 2, 1, 1), stage(GENERATION, 1, 2, 2, first=4)
    exchange = plan_weight_sync(training, generation, TOPOLOGY, Limits())
    meshes = plan_weight_sync(training, generation, TOPOLOGY, Limits(), by_meshes=True)
    assert exchange.keys() == meshes.keys() == {0, 1, 4, 5, 6, 7}
    for rank, plan in meshes.items():
        assert plan.meshes
        assert not plan.rounds
        assert not exchange[rank].meshes
        assert plan.ranks == (0, 1, 4, 5, 6, 7)
        assert plan.digest == exchange[rank].digest
    moved = {move.logical for plan in meshes.values() for move in plan.meshes}
    assert moved == {tensor.name for tensor in SPEC.tensors}


def test_generation_on_trainings_own_gpus_is_no_case_for_meshes() -> None:
    with pytest.raises(InvalidOperation, match=r"both sides.*NEREUS_M2N"):
        plan_weight_sync(
            stage(TRAINING, 2, 1, 1), stage(GENERATION, 1, 1, 2), TOPOLOGY, Limits(), by_meshes=True
        )
