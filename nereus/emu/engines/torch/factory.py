"""Makes torch engines for the registry."""

from __future__ import annotations

import torch

from nereus.emu.arena import ShardState
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups


def open_trainer(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> TorchEngine:
    """A TrainEngine, or with no optimizer a ScoreEngine."""
    return TorchEngine(
        spec.model,
        groups.layout,
        groups,
        optimizer=spec.optimizer,
        device=device,
        recompute=spec.recompute,
        state=state,
        zero1=spec.zero1,
        router_balance=spec.router_balance,
    )


def open_generator(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> TorchGenerator:
    """A GenerateEngine."""
    return TorchGenerator(spec.model, groups.layout, groups, state=state, device=device)
