"""Makes DeepSpeed engines for the registry."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from nereus.config.environment import set_defaults
from nereus.emu.arena import ShardState
from nereus.emu.engines.protocol import TrainEngine
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups

if find_spec("deepspeed") is None:
    raise ModuleNotFoundError("No module named 'deepspeed'")


def open_trainer(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> TrainEngine:
    """A TrainEngine, or with no optimizer a ScoreEngine."""
    # DeepSpeed chooses its accelerator, for the whole process, when it is imported.
    set_defaults({"DS_ACCELERATOR": device.type, "DEEPSPEED_LOG_LEVEL": "error"})
    from nereus.emu.engines.deepspeed.engine import DeepSpeedTrainer

    return DeepSpeedTrainer(
        spec.model,
        groups.layout,
        groups,
        optimizer=spec.optimizer,
        device=device,
        recompute=spec.recompute,
        zero1=spec.zero1,
        state=state,
    )
