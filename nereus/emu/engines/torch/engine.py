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
from nereus.emu.arena import ShardState
from nereus.emu.batch import Scores, TokenBatch, TrainBatch
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.arena_engine import ArenaEngine
from nereus.emu.engines.torch.accumulate import accumulate
from nereus.emu.engines.torch.experts import ExpertGroup
from nereus.emu.engines.torch.forward import Stage
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.rope import RopeTable
from nereus.emu.engines.torch.score import score
from nereus.emu.engines.torch.scored import Limit, Read
from nereus.emu.engines.torch.weights import covered, leaves, stage_weights, without_adapters
from nereus.emu.layout import Layout
from nereus.emu.loss import Loss
from nereus.emu.unit_groups import UnitGroups


class TorchEngine(ArenaEngine):
    """A ScoreEngine, and with an optimizer a TrainEngine, without other packages.

    The arenas of all kinds but theta are of what is trained: of a model with adapters of these alone, and
    with `zero1`, where the units share the optimizer's state, of this unit's slice. `router_balance` is the
    coefficient of the loss that evens the load of a mixture's experts.
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
        super().__init__(
            config,
            decoder_spec(config),
            layout,
            groups,
            optimizer=optimizer,
            device=device,
            zero1=zero1,
            state=state,
        )
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
    def stage(self) -> Stage:
        """The stage's weights by role, for generation on the same shard."""
        return self._stage

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

    def _forward(
        self,
        batch: TokenBatch,
        limit: Limit,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        read: Read = "response",
    ) -> Scores:
        return score(
            self._stage, self._groups, batch, limit, temperature=temperature, entropy=entropy, read=read
        )

    def _accumulate(
        self, micro_batches: Sequence[TrainBatch], loss: Loss, counts: GlobalCounts
    ) -> dict[str, Tensor]:
        return accumulate(self._stage, self._groups, micro_batches, loss, counts)
