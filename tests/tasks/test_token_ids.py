"""The engine's token ids are what is scored and learnt from: text is made of them, never made into them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models

from nereus.algorithms.aggregation import GlobalCounts
from nereus.data.prompt import Prompt
from nereus.emu.batch import Rollouts, Sampling, TrainBatch
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.layout import Layout
from nereus.emu.source import fill
from nereus.emu.unit_groups import UnitGroups
from nereus.rewards.function import RewardRequest, RewardResult
from nereus.tasks.growing import Growing
from nereus.tasks.job import Job
from nereus.tasks.score import score_rewards
from tests.emu.engines.generate_cases import make_prompts, responses
from tests.emu.engines.torch_cases import ADAM, SMALL, Random, TokenLoss

HOW = Sampling(max_new_tokens=2, seed=5)
PROMPTS = make_prompts([[5, 9, 61]] * 8)


def generated() -> tuple[TorchEngine, TorchGenerator, Rollouts]:
    layout = Layout.make(decoder_spec(SMALL), tp=1, pp=1, ranks=(0,))
    groups = UnitGroups.alone(layout)
    engine = TorchEngine(SMALL, layout, groups, optimizer=ADAM)
    fill(engine.state, Random(SMALL), {"theta": "theta"})
    generator = TorchGenerator(SMALL, layout, groups, state=engine.state)
    return engine, generator, generator.generate(PROMPTS, HOW, 0)


def tokenizer_that_joins(he: int, llo: int) -> Tokenizer:
    """A vocabulary in which these two tokens spell what is one token of its own."""
    names = {he: "he", llo: "llo"}
    free = iter(token for token in range(67) if token not in names)
    names |= {next(free): text for text in ("h", "e", "l", "o", "ll", "hello")}
    names |= {token: chr(0x4E00 + token) for token in range(67) if token not in names}
    vocab = {text: token for token, text in names.items()}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class Watch:
    """A reward function that keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[RewardRequest] = []

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        self.requests += requests
        return [RewardResult(value=1.0) for _ in requests]


def test_he_and_llo_stay_two_tokens() -> None:
    engine, _, several = generated()
    number, (he, llo) = next((i, ids) for i, ids in enumerate(responses(several)) if ids[0] != ids[1])
    rollouts = several.select([number])
    tokenizer = tokenizer_that_joins(he, llo)
    assert tokenizer.decode([he, llo]) == "hello"
    (joined,) = tokenizer.encode("hello").ids
    assert joined not in (he, llo)  # a way through text would have one token, another one

    watch = Watch()
    job = SimpleNamespace(
        reward=watch,
        prepared=SimpleNamespace(tokenizer=tokenizer),
        config=SimpleNamespace(batch=SimpleNamespace(samples=1)),
        stage=lambda _: torch.no_grad(),
    )
    prompt = Prompt(sample_id=0, token_ids=(5, 9, 61), text="")
    score_rewards.fn(cast(Job, job), [prompt], rollouts)
    (request,) = watch.requests
    assert (request.response, request.response_token_ids) == ("hello", (he, llo))

    scores = engine.score(rollouts.batch, micro_batch_rows=1)
    assert scores.logprobs_bt is not None
    assert scores.logprobs_bt.shape == (1, 2)
    torch.testing.assert_close(scores.logprobs_bt, rollouts.logprobs_bt, rtol=0, atol=1e-4)

    mask_bt = rollouts.batch.response_mask().float()
    counts = GlobalCounts.from_mask(mask_bt, max_tokens=2)
    train = TrainBatch(batch=rollouts.batch, mask_bt=mask_bt, advantages_bt=mask_bt)
    seen: list[Any] = []

    class Seen(TokenLoss):
        def __call__(self, scores: Any, batch: TrainBatch, counts: GlobalCounts) -> Any:
            seen.append((batch.batch.tokens_bs.tolist(), scores.logprobs_bt.detach().clone()))
            return super().__call__(scores, batch, counts)

    engine.train_step([train], Seen(), counts, learning_rate=1e-3)
    ((tokens, logprobs_bt),) = seen
    assert tokens == [[5, 9, 61, he, llo]]
    torch.testing.assert_close(logprobs_bt, rollouts.logprobs_bt, rtol=0, atol=1e-4)


def test_a_response_goes_on_from_the_engines_own_tokens() -> None:
    _, generator, whole = generated()
    growing = Growing(prompts=PROMPTS, max_new_tokens=2)
    while len(rows := growing.open_r):
        growing.add(rows, generator.generate(growing.to_go_on(rows, most=1), HOW, 0))
    assert responses(growing.finished()) == responses(whole)
