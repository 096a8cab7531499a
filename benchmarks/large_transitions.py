"""Transitions of a PPO job on a thousand GPUs: four models of 70B and 8B under published plans' shapes."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.emu.decoder import decoder_spec
from nereus.emu.kinds import serving_kinds, training_kinds
from nereus.emu.layout import Layout
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit import ClusterState, Unit, UnitId
from nereus.planner.models import model_shape

Places = Mapping[str, tuple[int, int, float, float]]  # tp, pp, and the part of the cluster from .. to

START: Places = {
    "actor.generation": (4, 1, 0, 1),
    "actor.training": (8, 4, 0, 0.5),
    "critic.training": (8, 4, 0.5, 1),
    "critic.inference": (8, 4, 0.5, 0.75),
    "reference.inference": (8, 1, 0, 0.5),
    "reward.inference": (1, 1, 0.75, 1),
}
LONGER: Places = {
    **START,
    "actor.generation": (8, 1, 0, 1),
    "actor.training": (8, 8, 0, 0.5),
    "critic.training": (8, 8, 0.5, 1),
}
EVERYTHING: Places = {
    "actor.generation": (8, 1, 0, 1),
    "actor.training": (8, 8, 0, 0.75),
    "critic.training": (8, 4, 0.75, 1),
    "critic.inference": (8, 2, 0, 0.5),
    "reference.inference": (4, 1, 0.5, 0.75),
    "reward.inference": (2, 1, 0.75, 1),
}


def large_models() -> dict[str, ModelSpec]:
    """The models by key."""
    large, small = (decoder_spec(model_shape(name)) for name in ("llama-3.1-70b", "llama-3.1-8b"))
    return {"actor": large, "critic": large, "reference": large, "reward": small}


def large_state(models: Mapping[str, ModelSpec], places: Places, num_gpus: int) -> ClusterState:
    """The units of a plan on consecutive GPUs."""
    units: list[Unit] = []
    for model_stage, (tp, pp, lo, hi) in places.items():
        model, size = model_stage.partition(".")[0], tp * pp
        kinds = training_kinds("bf16") if model_stage.endswith("training") else serving_kinds("bf16")
        starts = range(round(lo * num_gpus), round(hi * num_gpus) - size + 1, size)
        units += [
            Unit(
                id=UnitId(model_stage, index),
                model=model,
                layout=Layout.make(models[model], tp=tp, pp=pp, ranks=tuple(range(at, at + size))),
                kinds=kinds,
            )
            for index, at in enumerate(starts)
        ]
    return ClusterState.of(units, range(num_gpus))
