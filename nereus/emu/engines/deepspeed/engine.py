"""The DeepSpeed engine: scoring and training of one shard by a DeepSpeedEngine at ZeRO stage 0 with AutoTP.

    rows --> our embedding --> DeepSpeedEngine over a Hugging Face trunk --> our head --> loss
         gradients in the arena <-- DeepSpeedEngine.backward <--'
         DeepSpeedEngine.step --> ArenaStep: units, norm, clip, AdamW on the arenas

A unit is DeepSpeed's whole world, so that its data parallelism has one rank and ours is the only one.
Weights, moments and gradients lie in arenas as the torch engine's do: transitions, weight syncs and
checkpoints know nothing of DeepSpeed. The vocabulary is cut by our embedding and head, since AutoTP keeps
them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.arena import ShardState
from nereus.emu.batch import Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engine_limits import check_layout
from nereus.emu.engines.arena_engine import ArenaEngine
from nereus.emu.engines.deepspeed.process import DeepSpeedProcess, initialize
from nereus.emu.engines.deepspeed.step import StepOptimizer
from nereus.emu.engines.deepspeed.trunk import Binding, make_trunk
from nereus.emu.engines.padded_rows import Rows
from nereus.emu.engines.timed_sums import timed_sums
from nereus.emu.engines.torch.accumulate import add_sums, on_device
from nereus.emu.engines.torch.clock import Clock
from nereus.emu.engines.torch.forward import head_scores
from nereus.emu.engines.torch.model import embed
from nereus.emu.engines.torch.optimizer import AdamW
from nereus.emu.engines.torch.packing import Packed, pack
from nereus.emu.engines.torch.rows import take_rows
from nereus.emu.engines.torch.scored import Limit, Read, Scored
from nereus.emu.engines.torch.weights import covered, leaves, stage_weights
from nereus.emu.layout import Layout
from nereus.emu.loss import Loss
from nereus.emu.unit_groups import UnitGroups

TIMEOUT = timedelta(minutes=10)


def settings(layout: Layout) -> dict[str, object]:
    """DeepSpeed's configuration. Clipping is ours, over all units: DeepSpeed's default would clip at 1."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "tensor_parallel": {"autotp_size": layout.tp},
    }


class DeepSpeedTrainer(ArenaEngine):
    """A ScoreEngine, and with an optimizer a TrainEngine. Collective over the unit when it is made.

    Raises InvalidLayout for a cut that DeepSpeed cannot make: pipeline stages, or a tp that does not divide
    the heads.
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
        zero1: bool = False,
        state: ShardState | None = None,
    ) -> None:
        check_layout("deepspeed", config, layout)
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
        self._optimizer: StepOptimizer | None = None
        theta = self._state["theta"]
        self._process = DeepSpeedProcess(groups, self._device, TIMEOUT)
        with self._process.entered():
            views = covered(theta) if self._grad is None else leaves(theta, self._grad)
            self._ends = replace(
                stage_weights(config, theta.shard, views, self._process.tp_group()), layers=()
            )
            trunk = make_trunk(config, self._device, recompute=recompute)
            if self._step is not None:
                parameters = list(trunk.parameters())
                self._optimizer = StepOptimizer(parameters, self._step, self._process, self._updating)
            self._engine = initialize(trunk, self._optimizer, settings(layout))
            if layout.tp > 1:
                self._engine.first_dataloader_check.remove()  # a unit's ranks are given the same rows
            self._binding = Binding(trunk, theta, self._grad)
            self._binding.bind()
            if self._optimizer is None:
                self._binding.freeze()
        if self._optimizer is not None:
            self._optimizer.leave_to_deepspeed(trunk)

    def close(self) -> None:
        """Let DeepSpeed's engine go, and the unit's world with it."""
        with self._process.entered():
            self._engine.destroy()
        self._process.close()

    def _accumulate(
        self, micro_batches: Sequence[TrainBatch], loss: Loss, counts: GlobalCounts
    ) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        with self._process.entered(), timed_sums():
            self._binding.bind_gradients()
            self._engine.train()
            for batch in (one.trimmed() for one in micro_batches):
                packed = pack(batch.batch).to(self._device)
                scores = self._scores(packed, temperature=loss.temperature, entropy=loss.needs_entropy)
                share, parts = loss(scores, on_device(self._device, batch), counts)
                add_sums(sums, {"loss": share} | parts)
                self._engine.backward(share)
        return sums

    def _update(
        self, sums: dict[str, Tensor], clock: Clock, learning_rate: float, loss_scale: float
    ) -> TrainMetrics:
        assert self._optimizer is not None, "built without an optimizer"
        self._optimizer.prepare(sums, clock, learning_rate, loss_scale)
        with self._process.entered():
            self._engine.step()
        return self._optimizer.metrics

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
        with torch.no_grad(), self._process.entered(), timed_sums():
            self._engine.eval()
            for rows_c, packed in scored.micro_batches(limit):
                scored.put(rows_c, self._scores(packed, temperature=temperature, entropy=entropy))
        return scored.shared(self._groups)

    def _scores(self, packed: Packed, *, temperature: float, entropy: bool) -> Scores:
        """One micro-batch through embedding, trunk and head. Padding is on the right: causality hides it."""
        rows = Rows.of(packed)
        tokens_bs = rows.tokens_bs
        x_bsh = embed(tokens_bs.reshape(-1), self._ends).view(*tokens_bs.shape, -1)
        out = self._engine(inputs_embeds=x_bsh, position_ids=rows.positions_bs, use_cache=False)
        hidden_nh = out.last_hidden_state.flatten(0, 1)
        return head_scores(
            take_rows(hidden_nh, rows.select_m),
            packed,
            head=self._ends.head,
            score=self._ends.score,
            vocab_start=self._ends.vocab[0],
            group=self._ends.tp,
            temperature=temperature,
            entropy=entropy,
        )
