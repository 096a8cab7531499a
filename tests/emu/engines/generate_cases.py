"""What the workers of generation tests run, and plain references for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.batch import PromptBatch, Rollouts, Sampling
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.groups import Generation
from nereus.emu.hf_folder import HFSource
from nereus.emu.layout import Layout
from nereus.emu.source import LogicalSource, fill
from nereus.emu.store import StoreAddress
from nereus.emu.unit_groups import UnitGroups
from tests.emu.engines.torch_cases import Case, Random


def make_prompts(
    prompts: Sequence[Sequence[int]], *, greedy: bool | Sequence[bool] = False, first_id: int = 0
) -> PromptBatch:
    """Right-padded with a token that must never be read."""
    width, num = max(map(len, prompts)), len(prompts)
    return PromptBatch(
        tokens_bs=torch.tensor([[*prompt, *[66] * (width - len(prompt))] for prompt in prompts]),
        lens_b=torch.tensor([len(prompt) for prompt in prompts]),
        sample_ids_b=torch.arange(first_id, first_id + num),
        greedy_b=torch.tensor([greedy] * num if isinstance(greedy, bool) else list(greedy)),
    )


def alone(config: DecoderConfig, source: LogicalSource | None = None, **options: Any) -> TorchGenerator:
    """A generator of one rank in this process."""
    layout = Layout.make(decoder_spec(config), tp=1, pp=1, ranks=(0,))
    generator = TorchGenerator(config, layout, UnitGroups.alone(layout), **options)
    fill(generator.state, source or Random(config), {"theta": "theta"})
    return generator


def generate(
    worker: int,
    address: StoreAddress,
    number: int,
    case: Case,
    prompts: PromptBatch,
    sampling: Sampling,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """The rollouts as this worker returns them, as arrays."""
    generation = Generation.join(address, number=number, worker=worker, workers=range(case.world_size))
    try:
        layout = case.layout(0)
        groups = generation.unit_groups([layout], model=decoder_spec(case.config))
        assert groups is not None
        generator = TorchGenerator(case.config, layout, groups, max_rows=max_rows)
        source: LogicalSource = HFSource(case.folder) if case.folder else Random(case.config)
        fill(generator.state, source, {"theta": "theta"})
        out = arrays(generator.generate(prompts, sampling, 3))
        dist.barrier()
        return out
    finally:
        generation.leave()


def arrays(rollouts: Rollouts) -> dict[str, Any]:
    """Everything in rollouts, to compare and to send between processes."""
    return {
        "tokens": rollouts.batch.tokens_bs.numpy(),
        "prompt_lens": rollouts.batch.prompt_lens_b.numpy(),
        "lens": rollouts.batch.response_lens_b.numpy(),
        "logprobs": rollouts.logprobs_bt.numpy(),
        "stopped": rollouts.stopped_b.numpy(),
        "ids": rollouts.sample_ids_b.numpy(),
        "version": rollouts.version,
    }


def responses(rollouts: Rollouts) -> list[list[int]]:
    """The responses as lists of token ids."""
    batch = rollouts.batch
    rows = zip(
        batch.tokens_bs.tolist(), batch.prompt_lens_b.tolist(), batch.response_lens_b.tolist(), strict=True
    )
    return [tokens[prompt : prompt + response] for tokens, prompt, response in rows]


def greedy_of_transformers(model: Any, prompts: Sequence[Sequence[int]], num: int) -> list[list[int]]:
    """`num` tokens of transformers' own greedy search, a prompt at a time."""
    out = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)])
        with torch.no_grad():
            found: Tensor = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        out.append(found[0, len(prompt) :].tolist())
    return out
