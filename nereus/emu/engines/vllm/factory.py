"""Makes vLLM's engine for the registry. It generates; other engines train."""

from __future__ import annotations

import torch

from nereus.emu.arena import ShardState
from nereus.emu.engines.vllm.generate import VllmGenerator
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups


def open_generator(
    spec: StageSpec, groups: UnitGroups, *, device: torch.device, state: ShardState | None
) -> VllmGenerator:
    """A GenerateEngine with an arena of its own."""
    assert state is None, "vLLM keeps packed weights; it cannot run on a training engine's arena"
    return VllmGenerator(spec, groups, device=device)
