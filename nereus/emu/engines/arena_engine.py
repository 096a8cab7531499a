"""What the training engines have in common: the arenas of one shard, scores, and the optimizer's step.

an engine: _forward(rows) -> Scores         _accumulate(micro-batches, loss) -> gradients, sums
here:      score, rewards                   train_step: zero -> accumulate -> reduce -> update
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import Arena, ShardState
from nereus.emu.batch import Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.decoder import DecoderConfig
from nereus.emu.engines.protocol import TORN
from nereus.emu.engines.torch.clock import Clock
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.scored import Limit, Read, last_values
from nereus.emu.engines.torch.shard_arenas import ShardArenas
from nereus.emu.layout import Layout
from nereus.emu.loss import Loss, ScaledLoss
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit_groups import UnitGroups


class ArenaEngine(ABC):
    """A ScoreEngine, and with an optimizer a TrainEngine, whose weights, moments and gradients are arenas.

    Without `state` the arenas are new and zero: `fill` them. With it the engine takes over arenas that a
    transaction has prepared; they must be of this layout's shard of `spec` and hold every kind of state.
    """

    def __init__(
        self,
        config: DecoderConfig,
        spec: ModelSpec,
        layout: Layout,
        groups: UnitGroups,
        *,
        optimizer: AdamW | None,
        device: torch.device | str,
        zero1: bool,
        state: ShardState | None,
    ) -> None:
        self.step_count = 0  # Adam's t; part of the logical state, so whoever moves the moments sets it too
        self._config, self._groups, self._device = config, groups, torch.device(device)
        arenas = ShardArenas.of(
            config,
            spec,
            layout,
            groups,
            optimizer=optimizer,
            device=self._device,
            zero1=zero1,
            state=state,
        )
        self._state, self._grad, self._step = arenas.state, arenas.grad, arenas.step

    @property
    def state(self) -> ShardState:
        """The shard's arenas; a write into them is at once the model's."""
        return self._state

    @property
    def grad(self) -> Arena | None:
        """Gradients of the last step, clipped (with zero1 this unit's own); None without an optimizer."""
        return self._grad

    def score(
        self,
        batch: TokenBatch,
        *,
        micro_batch_rows: int,
        micro_batch_tokens: int | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Scores:
        """Log-probabilities (or values, for a value head) of the response tokens; rows in order.

        The value of a response token is the critic's estimate before it is produced, read off the same hidden
        state as its log-probability.
        """
        limit = (micro_batch_rows, micro_batch_tokens)
        return self._forward(batch, limit, temperature=temperature, entropy=entropy)

    def rewards(
        self, batch: TokenBatch, *, micro_batch_rows: int, micro_batch_tokens: int | None = None
    ) -> Tensor:
        """A reward model's judgement of each row, read at its last token; float32 [b]. Collective."""
        limit = (micro_batch_rows, micro_batch_tokens)
        return last_values(self._forward(batch, limit, read="last"))

    def train_step(
        self,
        micro_batches: Sequence[TrainBatch],
        loss: Loss,
        counts: GlobalCounts,
        *,
        learning_rate: float,
        loss_scale: float = 1.0,
    ) -> TrainMetrics:
        """One optimizer step; see the protocol. `stats` are the loss's sums over all units."""
        assert self._grad is not None, "built without an optimizer"
        assert micro_batches, "a step needs at least one micro-batch, if only of padding rows"
        clock = Clock(self._device)
        with clock.phase("forward_backward"):
            self._grad.flat.zero_()
            scaled = loss if loss_scale == 1 else ScaledLoss(loss=loss, scale=loss_scale)
            sums = self._accumulate(micro_batches, scaled, counts)
        return self._update(sums, clock, learning_rate, loss_scale)

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Nothing is held beside the state and the gradients, which go with the engine."""

    @abstractmethod
    def _forward(
        self,
        batch: TokenBatch,
        limit: Limit,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        read: Read = "response",
    ) -> Scores:
        """Log-probabilities, and entropy if asked, or values; on the CPU of every rank."""

    @abstractmethod
    def _accumulate(
        self, micro_batches: Sequence[TrainBatch], loss: Loss, counts: GlobalCounts
    ) -> dict[str, Tensor]:
        """Add the gradients of all micro-batches; returns this unit's sums, if only on the last stage."""

    def _update(
        self, sums: dict[str, Tensor], clock: Clock, learning_rate: float, loss_scale: float
    ) -> TrainMetrics:
        """Sum the gradients over units, clip, and update the arenas; collective over all units."""
        assert self._step is not None, "built without an optimizer"
        return self._step.take(
            sums, clock, self._updating, learning_rate=learning_rate, loss_scale=loss_scale
        )

    @contextmanager
    def _updating(self) -> Iterator[int]:
        """Adam's t of the update inside, which leaves the state torn if it does not end."""
        step_count, self.step_count = self.step_count + 1, TORN
        yield step_count
        self.step_count = step_count
