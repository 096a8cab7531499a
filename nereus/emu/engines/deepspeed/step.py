"""The optimizer that DeepSpeed steps: ours, over the arenas and over all units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from nereus.emu.batch import TrainMetrics
from nereus.emu.engines.deepspeed.process import DeepSpeedProcess
from nereus.emu.engines.torch.clock import Clock
from nereus.emu.engines.torch.step import ArenaStep


class StepOptimizer(torch.optim.Optimizer):
    """Takes the place of a client's optimizer in `deepspeed.initialize`; holds no state of its own.

    `prepare` says what the next step is, `DeepSpeedEngine.step` takes it, `metrics` tells what it did.
    `updating` surrounds every update of the arenas, with Adam's t.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        step: ArenaStep,
        process: DeepSpeedProcess,
        updating: Callable[[], AbstractContextManager[int]],
    ) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._step, self._process, self._updating = step, process, updating
        self._next: tuple[dict[str, Tensor], Clock, float, float] | None = None
        self._metrics: TrainMetrics | None = None

    def leave_to_deepspeed(self, model: nn.Module) -> None:
        """Do not sum again the partial gradients that AutoTP's own hooks sum over the unit."""
        summed = {
            f"model.{name}"
            for name, parameter in model.named_parameters()
            if hasattr(parameter, "_ds_grad_allreduce_registered")
        }
        rest = tuple(part for part in self._step.partial if part.physical not in summed)
        self._step = replace(self._step, partial=rest)

    def prepare(self, sums: dict[str, Tensor], clock: Clock, learning_rate: float, loss_scale: float) -> None:
        """The losses' sums, the clock, learning rate and loss scale of the step that DeepSpeed takes next."""
        self._next = sums, clock, learning_rate, loss_scale

    @property
    def metrics(self) -> TrainMetrics:
        """Those of the last step."""
        assert self._metrics is not None, "no step was taken"
        return self._metrics

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Sum the gradients over units, clip, and update the arenas; collective over all units."""
        assert self._next is not None, "a step is prepared first"
        sums, clock, learning_rate, loss_scale = self._next
        with self._process.outside():
            self._metrics = self._step.take(
                sums, clock, self._updating, learning_rate=learning_rate, loss_scale=loss_scale
            )
        self._next = None
