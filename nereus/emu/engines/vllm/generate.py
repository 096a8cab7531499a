"""Generation by vLLM: one engine in each worker's process, all ranks of a unit doing the same requests.

    prompts ─▶ requests, the same on every rank ─▶ vLLM: schedule, forward ─▶ logits ─▶ Choice ─▶ rollouts
    weight sync ─▶ arena ─▶ refresh: vLLM's loader reads this rank's part ─▶ prefix cache emptied

The arena is the landing place of weight syncs, laid out as the training side lays it out; vLLM keeps packed
weights of its own. An engine's layout is fixed: for another one it is closed and a new one made, in the same
process. A transition that leaves its unit alone leaves it, too (`rejoin`).
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.batch import PromptBatch, Rollouts, Sampling
from nereus.emu.engine_limits import check_layout
from nereus.emu.engines.own_world import OwnWorld
from nereus.emu.engines.rollouts import check_prompts, padded, side_by_side
from nereus.emu.engines.vllm import process
from nereus.emu.engines.vllm.weights import checkpoint_tensors, gather_vocabularies
from nereus.emu.groups import backend_for
from nereus.emu.layout import shard
from nereus.emu.serving import CPU_CACHE_BYTES, cache_bytes
from nereus.emu.stage import StageSpec
from nereus.emu.unit_groups import UnitGroups
from nereus.errors import DataError, explain

from vllm import LLM, SamplingParams, envs  # isort: skip  # after `process`
from vllm.distributed import parallel_state  # isort: skip
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # isort: skip
from nereus.emu.engines.vllm.choice import ROW, Choice, Chooser  # isort: skip

TIMEOUT = timedelta(minutes=10)  # of a collective; a dead peer closes its connection and is noticed at once


class VllmGenerator:
    """A `GenerateEngine`. Construction and every call but `close` are collective over the unit."""

    def __init__(self, spec: StageSpec, groups: UnitGroups, *, device: torch.device) -> None:
        check_layout("vllm", spec.model, groups.layout, on_cpu=device.type == "cpu")
        self.spec, self.groups, self.device = spec, groups, device
        mine = shard(spec.tensors, groups.layout, groups.rank)
        self._state = ShardState.empty(mine, {"theta": TORCH_DTYPE[spec.model.dtype]}, device)
        self._longest = spec.serving.longest_tokens or spec.model.max_positions
        process.use_torch_collectives()
        self._world = OwnWorld.open(groups, backend=backend_for(device), timeout=TIMEOUT)
        self._llm: LLM | None = None
        self._chooser: Chooser | None = None
        self._open()

    @property
    def state(self) -> ShardState:
        """The shard's weights; a weight sync writes into them, then `refresh` takes them into use."""
        return self._state

    def generate(self, prompts: PromptBatch, sampling: Sampling, version: int) -> Rollouts:
        """Answer every prompt, on the CPU of every rank.

        A response ends with the first of `sampling.stop_token_ids`, which it includes, or at the length
        limit. Raises DataError for an empty prompt, or one that may grow beyond what the engine was made for.
        """
        llm, chooser = self._parts()
        check_prompts(prompts)
        self._check_lengths(prompts, sampling)
        chooser.choice = choice = Choice(prompts, sampling, self.spec.model.vocab_size)
        requests = [
            {"prompt_token_ids": tokens[:length]}
            for tokens, length in zip(prompts.tokens_bs.tolist(), prompts.lens_b.tolist(), strict=True)
        ]
        with self._world.entered():
            outputs = llm.generate(requests, _requested(prompts, sampling), use_tqdm=False)
        chooser.choice = None
        tokens_bt, lens_b = padded([output.outputs[0].token_ids for output in outputs])
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        return side_by_side(
            prompts,
            tokens_bt,
            lens_b=lens_b,
            logprobs_bt=choice.logprobs(lens_b),
            stopped_b=torch.isin(tokens_bt, stops).any(dim=1),
            version=version,
        )

    def refresh(self) -> None:
        """Read the arena into vLLM's weights, and forget what the old ones computed."""
        llm, _ = self._parts()
        theta, model = self._state["theta"], self.spec.tensors
        gathered = gather_vocabularies(model, theta, self.groups)
        with self._world.entered():
            llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": checkpoint_tensors(model, theta, gathered)}
            )
            if self.spec.model.tied:
                llm.collective_rpc(_pack_heads)
            llm.reset_prefix_cache()

    def rejoin(self, groups: UnitGroups) -> None:
        """Go on in another generation of the world: vLLM's own groups do not end with the old one."""
        assert groups.layout == self.groups.layout, "an engine's layout is fixed"
        self.groups = groups

    @property
    def llm(self) -> LLM:
        """vLLM's engine; use it within `entered`."""
        return self._parts()[0]

    def entered(self) -> AbstractContextManager[None]:
        """Inside, torch.distributed is that of vLLM's engine."""
        return self._world.entered()

    def close(self) -> None:
        """End the engine and its groups, and free its memory. Not collective: peers may be gone."""
        if self._llm is None:
            return
        with self._world.entered():
            with process.without_collections():
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._chooser = None
            parallel_state.destroy_model_parallel()
            if parallel_state._WORLD is not None:
                parallel_state._WORLD.destroy()
            # destroy_distributed_environment would forget the groups of all worlds by name.
            parallel_state._WORLD = parallel_state._NODE_COUNT = None
        self._world.close()
        envs.disable_envs_cache()
        gc.collect()  # an engine is made of cycles, which hold its memory and connections

    def _open(self) -> None:
        layout, rank = self.groups.layout, self.groups.layout.ranks.index(self.groups.rank)
        launched = process.launched(rank, layout.world_size, self.device.index or 0, layout.layers)
        if self.device.type == "cuda":
            gc.collect()  # what engines before this one left is memory that it may need
        process.replace_kernels_once()
        with (
            self._world.entered(),
            launched,
            process.without_collections(),
            tempfile.TemporaryDirectory() as folder,
        ):
            (Path(folder) / "config.json").write_text(json.dumps(self.spec.model.to_hf()))
            self._llm = LLM(folder, **self._options())
            (self._chooser,) = self._llm.collective_rpc(_find_chooser)
            self._llm.collective_rpc(_receive_hidden)

    def _options(self) -> dict[str, Any]:
        layout, serving = self.groups.layout, self.spec.serving
        eager = self.device.type == "cpu" if serving.eager is None else serving.eager
        return {
            "skip_tokenizer_init": True,
            "load_format": "dummy",  # the weights come by `refresh`
            "dtype": str(self._state["theta"].dtype).removeprefix("torch."),
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "distributed_executor_backend": "external_launcher",
            "max_model_len": self._longest,
            "max_num_seqs": serving.rows,
            "kv_cache_memory_bytes": self._cache_bytes(),
            "logits_processors": [Chooser],
            "enforce_eager": eager,
            "async_scheduling": False,  # the choice needs the last token's row
            "disable_custom_all_reduce": True,  # it needs peers that see one another's GPUs
            "seed": 0,  # nothing is drawn from it
        }

    def _cache_bytes(self) -> int:
        serving = self.spec.serving
        if (limit := serving.kv_cache_bytes) is None:
            cuda = self.device.type == "cuda"
            limit = torch.cuda.mem_get_info(self.device)[0] // 2 if cuda else CPU_CACHE_BYTES
        return cache_bytes(
            self.spec.model,
            self.groups.layout.tp,
            max(self.groups.layout.layers),
            longest_tokens=self._longest,
            rows=serving.rows,
            limit_bytes=limit,
        )

    def _parts(self) -> tuple[LLM, Chooser]:
        assert self._llm is not None, "the engine is closed"
        assert self._chooser is not None, "the engine is closed"
        return self._llm, self._chooser

    def _check_lengths(self, prompts: PromptBatch, sampling: Sampling) -> None:
        longest = int((prompts.lens_b + prompts.limits_b(sampling)).max()) if prompts.num_rows else 0
        if longest > self._longest:
            raise DataError(
                explain(
                    "vLLM cannot answer the prompts",
                    values=f"a prompt and its response may have {longest} tokens, the engine takes "
                    f"{self._longest}",
                    rule="prompt and response fit into the model's positions",
                    remedy="lower sampling.max_new_tokens, or drop or truncate long prompts",
                )
            )


def _requested(prompts: PromptBatch, sampling: Sampling) -> Sequence[SamplingParams]:
    """One request's parameters a row. vLLM samples greedily: the choice has left it one token."""
    return [
        SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            extra_args={ROW: row},
        )
        for row, limit in enumerate(prompts.limits_b(sampling).tolist())
    ]


def _pack_heads(worker: Any) -> None:
    """Pack a tied output layer anew: it shares the embedding's weight, but on CPUs keeps a packed copy that a
    reload of the embedding does not touch.
    """
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _receive_hidden(worker: Any) -> None:
    """Make the buffer in which a later pipeline stage receives hidden states: vLLM makes it in a warm-up run,
    which it leaves out on CPUs.
    """
    runner = worker.model_runner
    if runner.intermediate_tensors is None and not parallel_state.get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _find_chooser(worker: Any) -> Chooser:
    """The processor that vLLM made for its running batch."""
    processors = worker.model_runner.input_batch.logitsprocs.non_argmax_invariant
    return next(each for each in processors if isinstance(each, Chooser))
