"""The arenas of one shard that an engine scores or trains: its state, its gradients, and the optimizer on
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nereus.emu.arena import TORCH_DTYPE, Arena, ShardState, training_kinds
from nereus.emu.decoder import DecoderConfig
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.slices import Slices
from nereus.emu.engines.torch.step import ArenaStep
from nereus.emu.layout import Layout, shard
from nereus.emu.lora import trained_part
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit_groups import UnitGroups


@dataclass(frozen=True, kw_only=True)
class ShardArenas:
    """`grad` and `step` are None without an optimizer; of a model with adapters they are of these alone."""

    state: ShardState
    grad: Arena | None
    step: ArenaStep | None

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        spec: ModelSpec,
        layout: Layout,
        groups: UnitGroups,
        *,
        optimizer: AdamW | None,
        device: torch.device,
        zero1: bool,
        state: ShardState | None,
    ) -> ShardArenas:
        """New arenas of zeros, or those of `state`, which must be of this rank's shard of `spec` and hold
        every kind. All kinds but theta are of what is trained; with `zero1` of this unit's slice of it.
        """
        model = trained_part(spec)
        mine, trained = shard(spec, layout, groups.rank), shard(model, layout, groups.rank)
        dtype = TORCH_DTYPE[config.dtype]
        kinds = {"theta": dtype} if optimizer is None else training_kinds(dtype)
        slices = Slices.of(model, layout, trained, groups) if zero1 and optimizer is not None else None
        omega = trained if slices is None else slices.own
        held = ShardState.empty(mine, kinds, device, omega) if state is None else state
        assert held.shard == mine, f"the state is not the shard of rank {groups.rank} in {layout}"
        assert kinds.keys() <= held.arenas.keys(), f"the state lacks some of {sorted(kinds)}"
        assert all(held[kind].shard == omega for kind in kinds if kind != "theta"), "not its part"
        if optimizer is None:
            return cls(state=held, grad=None, step=None)
        grad = Arena(trained, torch.float32, device)
        step = ArenaStep.of(held.part(trained), grad, model, layout, groups, optimizer, slices)
        return cls(state=held, grad=grad, step=step)
