"""From accumulated gradients to new weights: the second half of a training step, for state in arenas.

partial gradients --> units --> norm, clip --> AdamW
kv, tp, tie groups    dp group   unit group    flat arenas
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.arena import Arena, ShardState
from nereus.emu.batch import TrainMetrics
from nereus.emu.engines.torch import optimizer as adam
from nereus.emu.engines.torch.accumulate import total_sums
from nereus.emu.engines.torch.clock import Clock
from nereus.emu.engines.torch.gradients import (
    PartialGradient,
    complete,
    owned_spans,
    partial_gradients,
    squared_norm,
)
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.layout import Layout
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit_groups import UnitGroups


@dataclass(frozen=True, kw_only=True)
class ArenaStep:
    """The optimizer of one shard, over its arenas and the arena of its gradients."""

    state: ShardState
    grad: Arena
    groups: UnitGroups
    settings: AdamW
    partial: tuple[PartialGradient, ...]
    owned: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        state: ShardState,
        grad: Arena,
        spec: ModelSpec,
        layout: Layout,
        groups: UnitGroups,
        settings: AdamW,
    ) -> ArenaStep:
        """For a shard of `spec` under `layout`."""
        return cls(
            state=state,
            grad=grad,
            groups=groups,
            settings=settings,
            partial=partial_gradients(spec, layout, state.shard),
            owned=owned_spans(spec, layout, state.shard),
        )

    def take(
        self, sums: dict[str, Tensor], clock: Clock, *, learning_rate: float, step_count: int
    ) -> TrainMetrics:
        """Sum the gradients, clip them, and take step number `step_count`; collective over all units.

        `sums` are this unit's by name, `loss` among them, known to the last stage only. `grad` holds the
        clipped gradients afterwards.
        """
        with clock.phase("reduce"):
            complete(self.grad, self.partial, self.groups)
            if self.groups.dp is not None:
                dist.all_reduce(self.grad.flat, group=self.groups.dp)
            norm = self._norm()
            stats = total_sums(sums, self.groups, self.grad.device)
        with clock.phase("optimizer"):
            adam.clip(self.grad.flat, norm, self.settings.max_gradient_norm)
            adam.step(
                self.state,
                self.grad.flat,
                self.settings,
                learning_rate=learning_rate,
                step_count=step_count,
            )
        return TrainMetrics(
            loss=stats.pop("loss"),
            gradient_norm=norm,
            learning_rate=learning_rate,
            stats=stats,
            seconds=clock.seconds,
        )

    def _norm(self) -> float:
        """The norm over all logical elements of the model."""
        total: Tensor = squared_norm(self.grad.flat, self.owned)
        if self.groups.unit is not None:
            dist.all_reduce(total, group=self.groups.unit)
        return float(torch.sqrt(total))
