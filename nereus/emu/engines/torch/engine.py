"""The torch engine: scoring and training of one shard, for Llama, Qwen2, Qwen3 and mixtures of experts.

    micro-batches --> forward, backward --> partial gradients --> units --> norm, clip --> AdamW
                      (1F1B when pp > 1)    kv, tp, tie groups    dp group   unit group    flat arenas

The engine owns its arenas and the groups it was given and no global state; weights are views of the arena, so
a transaction or a checkpoint that writes into `state` between calls has changed the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import Arena, ShardState
from nereus.emu.batch import Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.protocol import TORN
from nereus.emu.engines.torch.accumulate import accumulate
from nereus.emu.engines.torch.clock import Clock
from nereus.emu.engines.torch.experts import ExpertGroup
from nereus.emu.engines.torch.forward import Stage
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.rope import RopeTable
from nereus.emu.engines.torch.score import score
from nereus.emu.engines.torch.scored import last_values
from nereus.emu.engines.torch.shard_arenas import ShardArenas
from nereus.emu.engines.torch.weights import covered, leaves, stage_weights, without_adapters
from nereus.emu.layout import Layout
from nereus.emu.loss import Loss
from nereus.emu.unit_groups import UnitGroups


class TorchEngine:
    """A ScoreEngine, and with an optimizer a TrainEngine.

    Without `state` the arenas are new and zero: `fill` them. With it the engine takes over arenas that a
    transaction has prepared; they must be of this layout's shard and hold every kind of state. The arenas of
    all kinds but theta are of what is trained: of a model with adapters of these alone, and with `zero1`,
    where the units share the optimizer's state, of this unit's slice. `router_balance` is the coefficient of
    the loss that evens the load of a mixture's experts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        groups: UnitGroups,
        *,
        optimizer: AdamW | None,
        device: torch.device | str = "cpu",
        recompute: bool = False,
        state: ShardState | None = None,
        zero1: bool = False,
        router_balance: float = 0.0,
    ) -> None:
        self.step_count = 0  # Adam's t; part of the logical state, so whoever moves the moments sets it too
        self._config, self._groups = config, groups
        self._device = torch.device(device)
        arenas = ShardArenas.of(
            config,
            decoder_spec(config),
            layout,
            groups,
            optimizer=optimizer,
            device=self._device,
            zero1=zero1,
            state=state,
        )
        self._state, self._grad, self._step = arenas.state, arenas.grad, arenas.step
        theta = self._state["theta"]
        views = covered(theta)
        if self._grad is not None:
            views |= leaves(theta.part(self._grad.shard), self._grad)
        self._stage = Stage(
            weights=stage_weights(config, theta.shard, views, groups.tp, ExpertGroup(groups.ep)),
            table=RopeTable(config.rope, config.head_dim, theta.dtype, self._device),
            recompute=recompute,
            balance=router_balance,
        )

    @property
    def state(self) -> ShardState:
        """The shard's arenas; a write into them is at once the model's."""
        return self._state

    @property
    def stage(self) -> Stage:
        """The stage's weights by role, for generation on the same shard."""
        return self._stage

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
        return score(self._stage, self._groups, batch, limit, temperature=temperature, entropy=entropy)

    def score_frozen(
        self,
        batch: TokenBatch,
        *,
        micro_batch_rows: int,
        micro_batch_tokens: int | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Scores:
        """As `score`, by the model without its adapters; see the protocol."""
        frozen = replace(self._stage, weights=without_adapters(self._stage.weights))
        limit = (micro_batch_rows, micro_batch_tokens)
        return score(frozen, self._groups, batch, limit, temperature=temperature, entropy=entropy)

    def rewards(
        self, batch: TokenBatch, *, micro_batch_rows: int, micro_batch_tokens: int | None = None
    ) -> Tensor:
        """A reward model's judgement of each row, read at its last token; float32 [b]. Collective."""
        limit = (micro_batch_rows, micro_batch_tokens)
        return last_values(score(self._stage, self._groups, batch, limit, read="last"))

    def close(self) -> None:
        """Nothing is held beside the state and the gradients, which go with the engine."""

    def train_step(
        self, micro_batches: Sequence[TrainBatch], loss: Loss, counts: GlobalCounts, *, learning_rate: float
    ) -> TrainMetrics:
        """One optimizer step; see the protocol. `stats` are the loss's sums over all units."""
        assert self._grad is not None, "built without an optimizer"
        assert self._step is not None, "built without an optimizer"
        assert micro_batches, "a step needs at least one micro-batch, if only of padding rows"
        clock = Clock(self._device)
        with clock.phase("forward_backward"):
            self._grad.flat.zero_()
            sums = accumulate(self._stage, self._groups, micro_batches, loss, counts)
        reduced = self._step.reduce(sums, clock)
        step_count, self.step_count = self.step_count + 1, TORN
        metrics = self._step.update(reduced, clock, learning_rate=learning_rate, step_count=step_count)
        self.step_count = step_count
        return metrics
