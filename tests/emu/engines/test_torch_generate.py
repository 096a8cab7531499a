"""Generation: transformers' greedy tokens at every layout, and samples that do not move."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from nereus.emu.batch import Sampling, TokenBatch
from nereus.emu.decoder import decoder_spec
from nereus.emu.engines.torch import decode
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.engines.torch.kv_cache import KVCache
from nereus.emu.hf_folder import HFSource
from nereus.emu.layout import Layout
from nereus.emu.source import fill
from nereus.emu.unit_groups import UnitGroups
from nereus.errors import DataError
from tests.emu.engines import generate_cases as cases
from tests.emu.engines.generate_cases import alone, make_prompts, responses
from tests.emu.engines.torch_cases import LLAMA, QWEN2, QWEN3, SMALL, Case, Pool, Random
from tests.emu.engines.transformers_twin import frozen_twin

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
PROMPTS = [[5, 9, 61], [7], [3, 4, 5, 6, 7, 8, 9], [5, 9, 61], [64, 1]]
# float32 sums in another order over logits of order 1
LOGPROB_TOLERANCE = 1e-4


def sampling(num: int = 24, **changes: Any) -> Sampling:
    return replace(Sampling(max_new_tokens=num, seed=11, step=2), **changes)


def many_prompts(num: int = 24) -> list[list[int]]:
    draw = random.Random(4)
    return [[draw.randrange(67) for _ in range(draw.randrange(1, 7))] for _ in range(num)]


def assert_logprobs_fit(config: Any, result: dict[str, Any], temperature: float = 1.0) -> None:
    """The engine's log-probabilities equal those of transformers' full forward pass over the same tokens."""
    batch = TokenBatch(
        tokens_bs=torch.from_numpy(result["tokens"]),
        prompt_lens_b=torch.from_numpy(result["prompt_lens"]),
        response_lens_b=torch.from_numpy(result["lens"]),
    )
    with torch.no_grad():
        expected = frozen_twin(config).scores(batch, temperature=temperature).logprobs_bt
    assert expected is not None
    found = torch.from_numpy(result["logprobs"])
    torch.testing.assert_close(found, expected * batch.response_mask(), rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_at_every_layout(pool: Pool, family: str) -> None:
    config = FAMILIES[family]
    wanted = cases.greedy_of_transformers(frozen_twin(config).model, PROMPTS, 24)
    for tp, pp in LAYOUTS:
        results = pool.run(
            Case(config=config, tp=tp, pp=pp),
            cases.generate,
            make_prompts(PROMPTS, greedy=True),
            sampling(),
        )
        assert len(results) == tp * pp
        for result in results:
            for row, (prompt, answer) in enumerate(zip(PROMPTS, wanted, strict=True)):
                assert result["tokens"][row, : len(prompt) + 24].tolist() == [*prompt, *answer], (tp, pp, row)
        assert_logprobs_fit(config, results[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_do_not_move_with_the_layout(pool: Pool, family: str) -> None:
    config = FAMILIES[family]
    prompts, how = make_prompts(many_prompts()), sampling(temperature=0.9, top_p=0.95, stop_token_ids=(3, 8))
    expected = cases.arrays(alone(config).generate(prompts, how, 3))
    assert_logprobs_fit(config, expected, temperature=0.9)
    for tp, pp in ((2, 1), (1, 2), (2, 2), (4, 1)):
        for result in pool.run(Case(config=config, tp=tp, pp=pp), cases.generate, prompts, how):
            for name in ("tokens", "prompt_lens", "lens", "stopped", "ids", "version"):
                assert np.array_equal(result[name], expected[name]), (tp, pp, name)
            np.testing.assert_allclose(result["logprobs"], expected["logprobs"], atol=LOGPROB_TOLERANCE)


def test_uneven_heads_and_stages_generate_the_same(pool: Pool) -> None:
    config = replace(LLAMA, num_heads=6, num_kv_heads=3, num_layers=4)
    prompts, how = make_prompts(PROMPTS), sampling(stop_token_ids=(3,))
    expected = cases.arrays(alone(config).generate(prompts, how, 3))
    for result in pool.run(Case(config=config, tp=2, pp=2, layers=(1, 3)), cases.generate, prompts, how):
        assert np.array_equal(result["tokens"], expected["tokens"])


def test_published_checkpoints_decode_as_in_transformers(shared_data: Path) -> None:
    for folder in sorted((shared_data / "tiny_checkpoints").iterdir()):
        source = HFSource(folder)
        # In float32, since in bf16 two logits are often equal and the order of sums then decides.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompts = [[5, 9, 300, 17], [400], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
        wanted = cases.greedy_of_transformers(model, prompts, 32)
        generator = alone(source.config.with_dtype("fp32"), source)
        rollouts = generator.generate(make_prompts(prompts, greedy=True), sampling(32), 0)
        assert responses(rollouts) == wanted, folder.name


def test_stories_tell_upstreams_documented_text(shared_data: Path) -> None:
    folder = shared_data / "real" / "stories260K"
    source = HFSource(folder)
    prompts = make_prompts([[1]], greedy=True)
    (answer,) = responses(alone(source.config, source).generate(prompts, sampling(255), 0))
    document = (folder / "UPSTREAM_DOC_stories260K.md").read_text()
    story = document.split("-t 0.0\n")[1].split("\n```")[0]
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(answer)
    assert text.strip() == story[: len(text.strip())]
    assert len(text.strip()) >= len(story) - 1  # the last full stop is past the length upstream ran


def assert_same(parts: Sequence[Any], whole: Any, rows: Sequence[Sequence[int]]) -> None:
    answers, logprobs = responses(whole), whole.logprobs_bt
    for part, index in zip(parts, rows, strict=True):
        assert responses(part) == [answers[row] for row in index]
        assert part.stopped_b.tolist() == whole.stopped_b[list(index)].tolist()
        assert part.sample_ids_b.tolist() == list(index)
        width = part.logprobs_bt.shape[1]
        torch.testing.assert_close(
            part.logprobs_bt, logprobs[list(index), :width], rtol=0, atol=LOGPROB_TOLERANCE
        )


def test_samples_do_not_move_with_the_batch_or_the_order_of_rows() -> None:
    prompts, how = make_prompts(many_prompts()), sampling(40, stop_token_ids=(3, 8))
    generator = alone(LLAMA)
    whole = generator.generate(prompts, how, 0)
    order = random.Random(2).sample(range(24), 24)
    for rows in ([range(24)], [range(0, 5), range(5, 24)], [[row] for row in range(24)], [order]):
        assert_same([generator.generate(prompts.select(list(r)), how, 0) for r in rows], whole, rows)
    assert_same([alone(LLAMA, max_rows=5).generate(prompts, how, 0)], whole, [range(24)])
    assert_same([alone(LLAMA, prefill_tokens=9).generate(prompts, how, 0)], whole, [range(24)])


def test_steps_seeds_and_sample_ids_give_other_samples() -> None:
    generator, prompts = alone(LLAMA), make_prompts([[5, 9]] * 4)
    base = responses(generator.generate(prompts, sampling(), 0))
    assert len({tuple(answer) for answer in base}) == 4
    assert responses(generator.generate(prompts, sampling(step=3), 0)) != base
    assert responses(generator.generate(prompts, sampling(seed=12), 0)) != base
    assert responses(generator.generate(prompts, sampling(), 0)) == base


def test_first_tokens_have_the_models_frequencies() -> None:
    num, temperature = 20_000, 0.8
    logits = frozen_twin(SMALL).logits(torch.tensor([[5, 9, 61]]))[0, -1].detach()
    generator = alone(SMALL)
    prompts = make_prompts([[5, 9, 61]] * num)
    rollouts = generator.generate(prompts, sampling(1, temperature=temperature), 0)
    counts = np.bincount([answer[0] for answer in responses(rollouts)], minlength=67)
    probs = (logits / temperature).softmax(-1).double().numpy()
    # At one in a million, so that the fixed seed passes unless the rule is wrong.
    assert stats.chisquare(counts, num * probs / probs.sum()).pvalue > 1e-6


def test_a_stop_token_ends_its_row_and_nothing_follows() -> None:
    generator, prompts = alone(LLAMA), make_prompts(many_prompts())
    free = responses(generator.generate(prompts, sampling(60), 0))
    stops = (3, 8, 20)
    rollouts = generator.generate(prompts, sampling(60, stop_token_ids=stops), 0)
    ends = [next((i for i, token in enumerate(row) if token in stops), None) for row in free]
    assert responses(rollouts) == [
        row if end is None else row[: end + 1] for row, end in zip(free, ends, strict=True)
    ]
    assert rollouts.stopped_b.tolist() == [end is not None for end in ends]
    assert 0 < sum(rollouts.stopped_b.tolist()) < 24
    batch = rollouts.batch
    past = torch.arange(batch.tokens_bs.shape[1]) >= (batch.prompt_lens_b + batch.response_lens_b)[:, None]
    assert not bool(batch.tokens_bs[past].any())
    assert not bool(rollouts.logprobs_bt[~batch.response_mask()].any())
    assert rollouts.logprobs_bt.shape == batch.response_mask().shape


def test_long_tails_grow_and_compact_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, how = make_prompts(many_prompts()), sampling(150, stop_token_ids=(3,))
    expected = alone(LLAMA).generate(prompts, how, 0)
    assert int(expected.batch.response_lens_b.max()) > 100
    moves: list[tuple[int, int]] = []
    keep = KVCache.keep

    def watched(self: Any, rows_r: Any, capacity: int, **lead: int) -> None:
        keep(self, rows_r, capacity, **lead)
        moves.append((len(self.pads_b), self.capacity))

    monkeypatch.setattr(KVCache, "keep", watched)
    monkeypatch.setattr(decode, "GROWTH", 4)
    small = alone(LLAMA).generate(prompts, how, 0)
    assert responses(small) == responses(expected)
    rows, slots = zip(*moves, strict=True)
    assert min(rows) < 4  # the tail ran in a cache of its own size
    assert slots[0] < max(slots) <= 6 + 150


def test_greedy_rows_mix_with_sampled_ones() -> None:
    generator, lists = alone(LLAMA), many_prompts(8)
    sampled = responses(generator.generate(make_prompts(lists), sampling(), 0))
    greedy = responses(generator.generate(make_prompts(lists, greedy=True), sampling(), 0))
    flags = [True, False] * 4
    mixed = responses(generator.generate(make_prompts(lists, greedy=flags), sampling(), 0))
    assert mixed == [g if flag else s for g, s, flag in zip(greedy, sampled, flags, strict=True)]
    cold = generator.generate(make_prompts(lists), sampling(temperature=0.0), 0)
    assert responses(cold) == greedy
    assert_logprobs_fit(LLAMA, cases.arrays(cold))


def test_a_weight_written_between_calls_counts_at_once() -> None:
    big = replace(SMALL, hidden_size=256, intermediate_size=1024)  # large enough to be packed
    generator = alone(big)
    prompts = make_prompts(PROMPTS)
    before = responses(generator.generate(prompts, sampling(), 0))
    generator.state["theta"].flat.mul_(1.5)
    after = responses(generator.generate(prompts, sampling(), 0))
    assert after != before
    generator.state["theta"].flat.div_(1.5)
    assert responses(generator.generate(prompts, sampling(), 0)) == before


def test_large_models_are_packed_and_score_the_same() -> None:
    big = replace(LLAMA, hidden_size=256, intermediate_size=1024, tied=True)
    result = cases.arrays(alone(big).generate(make_prompts(PROMPTS), sampling(), 0))
    assert_logprobs_fit(big, result)


def test_generation_shares_the_state_of_a_training_engine() -> None:
    layout = Layout.make(decoder_spec(LLAMA), tp=1, pp=1, ranks=(0,))
    groups = UnitGroups.alone(layout)
    engine = TorchEngine(LLAMA, layout, groups, optimizer=None)
    generator = TorchGenerator(LLAMA, layout, groups, state=engine.state)
    fill(engine.state, Random(LLAMA), {"theta": "theta"})
    rollouts = generator.generate(make_prompts(PROMPTS), sampling(temperature=0.7), 0)
    scores = engine.score(rollouts.batch, micro_batch_rows=2, temperature=0.7)
    assert scores.logprobs_bt is not None
    torch.testing.assert_close(scores.logprobs_bt, rollouts.logprobs_bt, rtol=0, atol=LOGPROB_TOLERANCE)


def test_rollouts_enter_a_loss() -> None:
    rollouts = alone(LLAMA).generate(make_prompts(PROMPTS), sampling(), 0)
    leaf = torch.zeros_like(rollouts.logprobs_bt, requires_grad=True)
    (leaf * rollouts.logprobs_bt).sum().backward()
    assert torch.equal(leaf.grad, rollouts.logprobs_bt)  # type: ignore[arg-type]


def test_half_precision_generates_and_scores_alike() -> None:
    config = LLAMA.with_dtype("bf16")
    layout = Layout.make(decoder_spec(config), tp=1, pp=1, ranks=(0,))
    engine = TorchEngine(config, layout, UnitGroups.alone(layout), optimizer=None)
    fill(engine.state, Random(config), {"theta": "theta"})
    generator = TorchGenerator(config, layout, UnitGroups.alone(layout), state=engine.state)
    rollouts = generator.generate(make_prompts(many_prompts()), sampling(stop_token_ids=(3,)), 0)
    scores = engine.score(rollouts.batch, micro_batch_rows=8)
    assert scores.logprobs_bt is not None
    # bf16 keeps 8 bits; logits are of order 4
    torch.testing.assert_close(scores.logprobs_bt, rollouts.logprobs_bt, rtol=0, atol=0.15)


def test_an_empty_prompt_is_refused_and_no_prompts_are_fine() -> None:
    generator = alone(LLAMA)
    prompts = make_prompts(PROMPTS)
    with pytest.raises(DataError, match="at least one token"):
        generator.generate(replace(prompts, lens_b=torch.tensor([3, 1, 0, 3, 2])), sampling(), 0)
    nothing = generator.generate(prompts.select([]), sampling(), 4)
    assert nothing.batch.num_rows == 0
    assert nothing.version == 4
