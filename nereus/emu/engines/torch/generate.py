"""Generation by the torch engine: prompts in, rollouts out, the same on every rank of the unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.feeding import Fed
from nereus.emu.engines.rollouts import check_prompts, side_by_side
from nereus.emu.engines.torch.decode import Runs, by_turns, decode
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.experts import ExpertGroup
from nereus.emu.engines.torch.forward import Stage
from nereus.emu.engines.torch.product import packed
from nereus.emu.engines.torch.rope import RopeTable
from nereus.emu.engines.torch.transcript import Finished
from nereus.emu.engines.torch.waiting import Waiting
from nereus.emu.engines.torch.weights import StageWeights, covered, stage_weights
from nereus.emu.layout import Layout, shard
from nereus.emu.unit_groups import UnitGroups

PACK_FROM_STEPS = 16  # a packed copy costs about as much as it saves in ten steps


@dataclass(kw_only=True)
class _Session:
    """Rows that are being answered: those that run, those that wait, and the prompts of all of them."""

    waiting: Waiting
    runs: Runs
    prompts: list[PromptBatch]


class TorchGenerator:
    """A `GenerateEngine` over one shard, its own or one that a training engine holds (`state`).

    On CPUs a packed copy of the large float32 weights is held for as long as rows run. At most `max_rows`
    rows are in the cache at once (None: all that come first), others enter as rows end; and at most
    `prefill_tokens` of prompts are computed at a time. Neither changes what is drawn. Ranks along ep have all
    rows and divide the experts alone.
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
        assert layout.cp == 1, "generation divides no sequence"
        self.config, self.layout, self.groups = config, layout, groups
        self.device = torch.device(device)
        dtype = TORCH_DTYPE[config.dtype]
        mine = shard(decoder_spec(config), layout, groups.rank)
        self._state = state or ShardState.empty(mine, {"theta": dtype}, self.device)
        assert self._state.shard == mine, "generation reads the weights of its own model"
        self._table = RopeTable(config.rope, config.head_dim, self._state["theta"].flat.dtype, self.device)
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens
        self._session: _Session | None = None

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
            return _nothing(prompts, version)
        fed = self.feed(prompts, sampling, version, begin=True, more=False)
        assert fed.rollouts is not None, "a closed session answers all of its rows"
        return fed.rollouts.select(torch.argsort(fed.rows_n))

    def feed(self, prompts: PromptBatch, sampling: Sampling, version: int, *, begin: bool, more: bool) -> Fed:
        """See `FeedEngine`. Collective over the unit. Raises DataError for an empty prompt."""
        check_prompts(prompts)
        if begin:
            self._session = self._begin(prompts.num_rows, sampling)
        session = self._session
        assert session is not None, "rows are fed to a session that was begun"
        session.prompts.append(prompts)
        session.waiting.add(prompts, more=more)
        with torch.inference_mode():
            session.runs = by_turns(session.runs, session.waiting)
            parts = [
                replace(part, logprobs_nt=self._from_last_stage(part.logprobs_nt))
                for part in session.waiting.take_finished()
            ]
        if not more:
            assert not session.runs, "a closed session runs to its end"
            self._session = None
        return _fed(session.prompts, parts, version)

    def refresh(self) -> None:
        """Forget rows that are being answered; beside that, every session reads the state as it is."""
        self._session = None

    def close(self) -> None:
        """Forget rows that are being answered."""
        self._session = None

    def _begin(self, num_rows: int, sampling: Sampling) -> _Session:
        """A session in as many sets of rows as there are pipeline stages, which share the slots."""
        assert num_rows, "a session begins with rows"
        num_slots, pp = min(num_rows, self._max_rows or num_rows), self.layout.pp
        shares = [num_slots * (i + 1) // pp - num_slots * i // pp for i in range(pp)]
        stage, waiting = Stage(weights=self._weights(sampling.max_new_tokens), table=self._table), Waiting()
        runs = [
            decode(
                DecodeForward(stage, self.groups, prefill_tokens=self._prefill_tokens),
                waiting,
                sampling,
                self.device,
                num_slots=share,
            )
            for share in shares
            if share
        ]
        return _Session(waiting=waiting, runs=runs, prompts=[])

    def _weights(self, num_steps: int) -> StageWeights:
        """Views of the state as it is now, packed where many steps repay the copy."""
        theta = self._state["theta"]
        ep = ExpertGroup(self.groups.ep, same_tokens=True)
        weights = stage_weights(self.config, theta.shard, covered(theta), self.groups.tp, ep)
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
            gate_up=None if layer.gate_up is None else packed(layer.gate_up),
            down=None if layer.down is None else packed(layer.down),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=None if weights.head is None else packed(weights.head))


def _nothing(prompts: PromptBatch, version: int) -> Rollouts:
    none = torch.zeros(0, dtype=torch.long)
    return side_by_side(
        prompts,
        none.view(0, 0),
        lens_b=none,
        logprobs_bt=torch.zeros(0, 0),
        stopped_b=none.bool(),
        version=version,
    )


def _fed(prompts: Sequence[PromptBatch], parts: Sequence[Finished], version: int) -> Fed:
    """Copies on the CPU, for inference tensors cannot enter a loss."""
    if not parts:
        return Fed(rows_n=torch.zeros(0, dtype=torch.long), rollouts=None)
    came = prompts[0] if len(prompts) == 1 else join_rows(prompts)
    rollouts = [
        side_by_side(
            came.select(part.rows_n),
            part.tokens_nt.cpu(),
            lens_b=part.lens_n.cpu().clone(),
            logprobs_bt=part.logprobs_nt.cpu().clone(),
            stopped_b=part.stopped_n.cpu().clone(),
            version=version,
        )
        for part in parts
    ]
    return Fed(rows_n=torch.cat([part.rows_n for part in parts]).clone(), rollouts=join_rows(rollouts))
