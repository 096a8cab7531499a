"""Makes DeepSpeed engines for the registry."""

from __future__ import annotations

import torch

from nereus.emu.arena import ShardState
from nereus.emu.engines.deepspeed.engine import DeepSpeedTrainer
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups


def open_trainer(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> DeepSpeedTrainer:
    """A TrainEngine, or with no optimizer a ScoreEngine."""
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
