"""The Megatron engine: scoring and training of one shard by megatron-core's GPTModel and schedules.

    rows --> Megatron's schedule over GPTModel --> head --> loss --> gradients in the arena --> ArenaStep
             (1F1B when pp > 1)                   ours                                        ours

Weights, moments and gradients lie in arenas as the torch engine's do, so transitions, weight syncs and
checkpoints know nothing of Megatron; only the storage order of qkv differs (`StageSpec.tensors`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import ShardState
from nereus.emu.batch import Scores, TokenBatch, TrainBatch
from nereus.emu.decoder import DecoderConfig
from nereus.emu.engine_limits import check_layout
from nereus.emu.engines.arena_engine import ArenaEngine
from nereus.emu.engines.megatron.groups import collection
from nereus.emu.engines.megatron.model import (
    bind,
    head_name,
    stage_model,
    transformer_config,
    uses_transformer_engine,
)
from nereus.emu.engines.megatron.process import MegatronProcess
from nereus.emu.engines.megatron.schedule import Schedule
from nereus.emu.engines.padded_rows import Rows
from nereus.emu.engines.torch.accumulate import add_sums, on_device
from nereus.emu.engines.torch.forward import head_scores
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.packing import Packed, pack
from nereus.emu.engines.torch.rows import take_rows
from nereus.emu.engines.torch.scored import Limit, Read, Scored
from nereus.emu.layout import Layout
from nereus.emu.loss import Loss
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit_groups import UnitGroups


class MegatronEngine(ArenaEngine):
    """A ScoreEngine, and with an optimizer a TrainEngine. `spec` is the model as Megatron stores it.

    Needs a default world, if only of one rank. Raises InvalidLayout for a cut that Megatron cannot make.
    """

    def __init__(
        self,
        config: DecoderConfig,
        spec: ModelSpec,
        layout: Layout,
        groups: UnitGroups,
        *,
        optimizer: AdamW | None,
        device: torch.device | str = "cpu",
        recompute: bool = False,
        zero1: bool = False,
        state: ShardState | None = None,
    ) -> None:
        check_layout("megatron", config, layout)
        super().__init__(
            config, spec, layout, groups, optimizer=optimizer, device=device, zero1=zero1, state=state
        )
        heads = [piece for piece in self._state.shard.pieces if piece.physical == head_name(config)]
        self._vocab = heads[0].box[0] if heads else (0, 0)
        self._process = MegatronProcess(self._device)
        ours = collection(groups)
        with self._process.entered(building=True):
            settings = transformer_config(config, layout, self._device, recompute=recompute)
            self._model = stage_model(config, settings, layout, groups.position, ours, self._device)
        bind(self._model, config, layout, groups.position, self._state["theta"], self._grad)
        self._schedule = Schedule(self._model, ours, masks=not uses_transformer_engine(self._device))

    def close(self) -> None:
        """Free Megatron's scratch memory and what it caches by module."""
        self._process.close()

    def _accumulate(
        self, micro_batches: Sequence[TrainBatch], loss: Loss, counts: GlobalCounts
    ) -> dict[str, Tensor]:
        trimmed = [batch.trimmed() for batch in micro_batches]
        packed = [pack(batch.batch).to(self._device) for batch in trimmed]
        rows = [Rows.of(one) for one in packed]
        sums: dict[str, Tensor] = {}

        def share_of(number: int, hidden_nh: Tensor) -> Tensor:
            scores = self._scores(
                packed[number],
                take_rows(hidden_nh, rows[number].select_m),
                temperature=loss.temperature,
                entropy=loss.needs_entropy,
            )
            share, parts = loss(scores, on_device(self._device, trimmed[number]), counts)
            add_sums(sums, {"loss": share} | parts)
            return share

        with self._process.entered():
            self._model.train()
            self._schedule.run(rows, share_of, forward_only=False)
        return sums

    def _forward(
        self,
        batch: TokenBatch,
        limit: Limit,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        read: Read = "response",
    ) -> Scores:
        scored = Scored(batch, self._config.head, self._device, entropy=entropy, read=read)
        parts = list(scored.micro_batches(limit))
        rows = [Rows.of(packed) for _, packed in parts]

        def keep(number: int, hidden_nh: Tensor) -> Tensor:
            places_c, packed = parts[number]
            hidden_mh = take_rows(hidden_nh, rows[number].select_m)
            scored.put(places_c, self._scores(packed, hidden_mh, temperature=temperature, entropy=entropy))
            return hidden_nh.new_zeros((), dtype=torch.float32)

        with torch.no_grad(), self._process.entered():
            self._model.eval()
            if rows:
                self._schedule.run(rows, keep, forward_only=True)
            return scored.shared(self._groups)

    def _scores(self, packed: Packed, hidden_mh: Tensor, *, temperature: float, entropy: bool) -> Scores:
        weight, (start, stop) = self._model.output_layer.weight, self._vocab
        is_value = self._config.head == "value"
        return head_scores(
            hidden_mh,
            packed,
            head=None if is_value else weight[: stop - start],  # pad rows take part in no softmax
            score=weight if is_value else None,
            vocab_start=start,
            group=self._groups.tp,
            temperature=temperature,
            entropy=entropy,
        )
