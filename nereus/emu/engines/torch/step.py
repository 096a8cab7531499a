"""From accumulated gradients to new weights: the second half of a training step, for state in arenas.

partial gradients --> units --> norm, clip --> AdamW
kv, tp, tie groups;   dp group   unit group    flat arenas
ep, cp groups

Where the units share the optimizer's state (ZeRO-1), each updates its slice alone (`slices`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.arena import Arena, ShardState
from nereus.emu.batch import TrainMetrics
from nereus.emu.engines.torch import optimizer as adam
from nereus.emu.engines.torch.accumulate import total_sums
from nereus.emu.engines.torch.clock import Clock, span
from nereus.emu.engines.torch.gradients import (
    CopySpan,
    PartialGradient,
    complete,
    copy_spans,
    owned_spans,
    partial_gradients,
    squared_norm,
    sum_copies,
)
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.slices import Slices
from nereus.emu.layout import Layout
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit_groups import UnitGroups


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Flat gradients summed over all units, their global norm, and the sums that the loss reports."""

    grad: Tensor
    norm: float
    stats: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ArenaStep:
    """The optimizer of one shard, over its arenas and the arena of its gradients.

    With `slices` the arenas of all kinds but theta hold this rank's slice of the shard, and `owned` are
    intervals of such an arena.
    """

    state: ShardState
    grad: Arena
    groups: UnitGroups
    settings: AdamW
    partial: tuple[PartialGradient, ...]
    copies: tuple[CopySpan, ...]
    owned: tuple[tuple[int, int], ...]
    slices: Slices | None = None

    @classmethod
    def of(
        cls,
        state: ShardState,
        grad: Arena,
        spec: ModelSpec,
        layout: Layout,
        groups: UnitGroups,
        settings: AdamW,
        slices: Slices | None = None,
    ) -> ArenaStep:
        """For a shard of `spec` under `layout`."""
        return cls(
            state=state,
            grad=grad,
            groups=groups,
            settings=settings,
            partial=partial_gradients(spec, layout, state.shard),
            copies=copy_spans(spec, layout, state.shard),
            owned=owned_spans(spec, layout, state.shard if slices is None else slices.own),
            slices=slices,
        )

    def take(
        self,
        sums: dict[str, Tensor],
        clock: Clock,
        updating: Callable[[], AbstractContextManager[int]],
        *,
        learning_rate: float,
        loss_scale: float,
    ) -> TrainMetrics:
        """Sum the gradients over units, clip, and update the arenas; collective over all units.

        `sums` are this unit's by name, `loss` among them, known to the last stage only. `updating` surrounds
        the update, with Adam's t. A gradient that is not finite on any rank reaches no weights of any: with a
        `loss_scale` above 1 the step has then not been, and can be tried with a smaller one; without, Adam's
        t counts it and everything else stays.
        """
        reduced = self._reduce(sums, clock, loss_scale)
        is_finite = math.isfinite(reduced.norm)
        if is_finite or loss_scale == 1:
            with clock.phase("optimizer"), updating() as step_count:
                if is_finite:
                    self._update(reduced, learning_rate=learning_rate, step_count=step_count)
        stats = dict(reduced.stats)
        return TrainMetrics(
            loss=stats.pop("loss"),
            gradient_norm=reduced.norm,
            learning_rate=learning_rate,
            stats=stats,
            seconds=clock.seconds,
        )

    def _reduce(self, sums: dict[str, Tensor], clock: Clock, loss_scale: float) -> Reduced:
        """The gradients and losses of all units, without their scale. Changes no state."""
        with clock.phase("reduce"):
            complete(self.grad, self.partial, self.groups)
            sum_copies(self.grad.flat, self.copies, self.groups)
            grad = self._summed()
            if loss_scale != 1:
                grad.mul_(1 / loss_scale)
            norm = self._norm(grad)
            stats = total_sums(sums, self.groups, self.grad.device)
            stats["loss"] /= loss_scale
        return Reduced(grad=grad, norm=norm, stats=stats)

    def _update(self, reduced: Reduced, *, learning_rate: float, step_count: int) -> None:
        """Clip the gradients and take step number `step_count`; with slices collective over all units.

        `grad` holds the clipped gradients afterwards; with slices it holds this unit's own gradients.
        """
        adam.clip(reduced.grad, reduced.norm, self.settings.max_gradient_norm)
        state = self.state if self.slices is None else self._sliced(self.slices)
        with span("optimizer"):
            adam.step(state, reduced.grad, self.settings, learning_rate=learning_rate, step_count=step_count)
        if self.slices is not None:
            self.slices.spread(state["theta"], self.state["theta"])

    def _summed(self) -> Tensor:
        """The gradients summed over the units: of the whole shard, or of this rank's slice."""
        if self.slices is not None:
            return self.slices.reduce(self.grad).flat
        if self.groups.dp is not None:
            with span("data_parallel"):
                dist.all_reduce(self.grad.flat, group=self.groups.dp)
        return self.grad.flat

    def _sliced(self, slices: Slices) -> ShardState:
        """This rank's slice of the weights, to be updated, beside its slice of the optimizer's state."""
        theta = slices.pack(self.state["theta"], slices.mine)
        return ShardState(shard=slices.own, arenas={**self.state.arenas, "theta": theta})

    def _norm(self, grad: Tensor) -> float:
        """The norm over all logical elements of the model."""
        total: Tensor = squared_norm(grad, self.owned)
        if self.groups.unit is not None:
            dist.all_reduce(total, group=self.groups.unit)
        if self.slices is not None and self.groups.dp is not None:
            dist.all_reduce(total, group=self.groups.dp)
        return float(torch.sqrt(total))
