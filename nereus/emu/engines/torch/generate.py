"""Generation by the torch engine: prompts in, rollouts out, the same on every rank of the unit."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.rollouts import check_prompts, side_by_side
from nereus.emu.engines.torch.decode import Decoded, by_turns, decode
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.forward import Stage
from nereus.emu.engines.torch.product import packed
from nereus.emu.engines.torch.rope import RopeTable
from nereus.emu.engines.torch.weights import StageWeights, covered, stage_weights
from nereus.emu.layout import Layout, shard
from nereus.emu.unit_groups import UnitGroups

PACK_FROM_STEPS = 16  # a packed copy costs about as much as it saves in ten steps


class TorchGenerator:
    """A `GenerateEngine` over one shard, its own or one that a training engine holds (`state`).

    On CPUs a call holds a packed copy of the large float32 weights for as long as it runs. At most `max_rows`
    prompts are in the cache at once (None: all of a call) and at most `prefill_tokens` of their tokens are
    computed at a time; neither changes what is drawn.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        groups: UnitGroups,
        *,
        state: ShardState | None = None,
        device: torch.device | str = "cpu",
        max_rows: int | None = None,
        prefill_tokens: int = 8192,
    ) -> None:
        self.config, self.layout, self.groups = config, layout, groups
        self.device = torch.device(device)
        dtype = TORCH_DTYPE[config.dtype]
        mine = shard(decoder_spec(config), layout, groups.rank)
        self._state = state or ShardState.empty(mine, {"theta": dtype}, self.device)
        self._table = RopeTable(config.rope, config.head_dim, self._state["theta"].flat.dtype, self.device)
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens

    @property
    def state(self) -> ShardState:
        """The shard's weights; a weight sync writes into them between calls."""
        return self._state

    def generate(self, prompts: PromptBatch, sampling: Sampling, version: int) -> Rollouts:
        """Answer every prompt, on the CPU of every rank. Collective over the unit.

        A response ends with the first of `sampling.stop_token_ids`, which it includes, or at the length
        limit; the model's own end-of-sequence ids stop nothing unless they are among them. Raises DataError
        for an empty prompt.
        """
        check_prompts(prompts)
        if prompts.num_rows == 0:
            return _rollouts(prompts, _nothing(), torch.zeros(0, 0), version)
        stage = Stage(weights=self._weights(sampling.max_new_tokens), table=self._table)
        at_once = torch.split(torch.arange(prompts.num_rows), self._max_rows or prompts.num_rows)
        parts = [self._answer(stage, prompts.select(rows), sampling, version) for rows in at_once]
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def refresh(self) -> None:
        """Nothing to do: every call reads the state as it is."""

    def close(self) -> None:
        """Nothing is held beside the state."""

    def _answer(self, stage: Stage, prompts: PromptBatch, sampling: Sampling, version: int) -> Rollouts:
        """Answer prompts whose caches fit together, in as many sets of rows as there are pipeline stages."""
        sets = [prompts.select(rows) for rows in torch.arange(prompts.num_rows).tensor_split(self.layout.pp)]
        sets = [rows for rows in sets if rows.num_rows]
        with torch.inference_mode():
            forwards = [DecodeForward(stage, self.groups, prefill_tokens=self._prefill_tokens) for _ in sets]
            runs = [decode(*each, sampling, self.device) for each in zip(forwards, sets, strict=True)]
            answers = by_turns(runs)
            logprobs = [self._from_last_stage(answer.logprobs_bt) for answer in answers]
        parts = [_rollouts(*each, version) for each in zip(sets, answers, logprobs, strict=True)]
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def _weights(self, num_steps: int) -> StageWeights:
        """Views of the state as it is now, packed where many steps repay the copy."""
        theta = self._state["theta"]
        weights = stage_weights(self.config, theta.shard, covered(theta), self.groups.tp)
        return _packed_stage(weights) if num_steps >= PACK_FROM_STEPS else weights

    def _from_last_stage(self, logprobs_bt: Tensor) -> Tensor:
        if self.groups.pp is not None:
            dist.broadcast(logprobs_bt, group=self.groups.pp, group_src=self.layout.pp - 1)
        return logprobs_bt


def _packed_stage(weights: StageWeights) -> StageWeights:
    layers = tuple(
        replace(
            layer,
            qkv=packed(layer.qkv),
            out=packed(layer.out),
            gate_up=packed(layer.gate_up),
            down=packed(layer.down),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=None if weights.head is None else packed(weights.head))


def _nothing() -> Decoded:
    none = torch.zeros(0, dtype=torch.long)
    return Decoded(
        tokens_bt=none.view(0, 0), logprobs_bt=torch.zeros(0, 0), lens_b=none, stopped_b=none.bool()
    )


def _rollouts(prompts: PromptBatch, decoded: Decoded, logprobs_bt: Tensor, version: int) -> Rollouts:
    """Copies on the CPU, for inference tensors cannot enter a loss."""
    return side_by_side(
        prompts,
        decoded.tokens_bt.cpu(),
        lens_b=decoded.lens_b.cpu().clone(),
        logprobs_bt=logprobs_bt.cpu().clone(),
        stopped_b=decoded.stopped_b.cpu().clone(),
        version=version,
    )
