"""Rows enter the batch as others leave it: the same samples, a bounded cache, fewer steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.batch import Rollouts, Sampling, join_rows
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.generate import TorchGenerator
from nereus.emu.engines.torch.kv_cache import KVCache
from tests.emu.engines import generate_cases as cases
from tests.emu.engines.generate_cases import alone, make_prompts, responses
from tests.emu.engines.torch_cases import LLAMA, QWEN2, SMALL, Case, Pool

# float32 sums in another order over logits of order 1: log-probabilities move, samples do not
LOGPROB_TOLERANCE = 1e-4
HOW = Sampling(max_new_tokens=40, seed=11, step=2, stop_token_ids=(3, 8))


def many_prompts(num: int, longest: int = 6) -> list[list[int]]:
    draw = random.Random(4)
    return [[draw.randrange(67) for _ in range(draw.randrange(1, longest + 1))] for _ in range(num)]


def assert_equal(found: Rollouts, expected: Rollouts) -> None:
    assert responses(found) == responses(expected)
    assert found.sample_ids_b.tolist() == expected.sample_ids_b.tolist()
    assert found.stopped_b.tolist() == expected.stopped_b.tolist()
    torch.testing.assert_close(found.logprobs_bt, expected.logprobs_bt, rtol=0, atol=LOGPROB_TOLERANCE)


@settings(max_examples=6, deadline=None)
@given(
    num=st.integers(1, 30),
    max_rows=st.integers(1, 9),
    limit=st.integers(1, 50),
    longest=st.integers(1, 60),
    greedy=st.integers(0, 5),
    stops=st.sampled_from([(), (3,), (3, 8, 20, 40, 50)]),
)
def test_slots_do_not_change_what_is_drawn(
    num: int, max_rows: int, limit: int, longest: int, greedy: int, stops: tuple[int, ...]
) -> None:
    flags = [row % 6 < greedy for row in range(num)]
    prompts = make_prompts(many_prompts(num, longest), greedy=flags)
    how = replace(HOW, max_new_tokens=limit, stop_token_ids=stops)
    one_by_one = alone(SMALL, max_rows=1)
    expected = join_rows([one_by_one.generate(prompts.select([row]), how, 0) for row in range(num)])
    assert_equal(alone(SMALL, max_rows=max_rows).generate(prompts, how, 0), expected)


@settings(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(1, 8), min_size=1, max_size=6), slots=st.integers(1, 9))
def test_rows_that_are_fed_are_answered_as_if_they_came_together(cuts: list[int], slots: int) -> None:
    prompts = make_prompts(many_prompts(slots + sum(cuts)))
    generator = alone(SMALL)
    expected = generator.generate(prompts, HOW, 0)
    edges = [0, slots, *(slots + sum(cuts[: i + 1]) for i in range(len(cuts)))]
    parts, rows = [], []
    for i, (lo, hi) in enumerate(itertools.pairwise(edges)):
        fed = generator.feed(prompts.select(range(lo, hi)), HOW, 0, begin=i == 0, more=i + 1 < len(edges) - 1)
        rows += fed.rows_n.tolist()
        parts += [] if fed.rollouts is None else [fed.rollouts]
    assert sorted(rows) == list(range(prompts.num_rows))
    assert_equal(join_rows(parts, torch.argsort(torch.tensor(rows))), expected)


def test_a_session_returns_as_soon_as_slots_are_free_and_not_before() -> None:
    prompts = make_prompts(many_prompts(40))
    generator = alone(LLAMA)
    first = generator.feed(prompts.select(range(16)), HOW, 0, begin=True, more=True)
    assert 2 <= len(first.rows_n) < 16  # an eighth of the slots, and others still run
    last = generator.feed(prompts.select([]), HOW, 0, begin=False, more=False)
    assert sorted([*first.rows_n.tolist(), *last.rows_n.tolist()]) == list(range(16))


def test_a_new_session_forgets_the_old_one() -> None:
    prompts = make_prompts(many_prompts(20))
    generator = alone(LLAMA)
    generator.feed(prompts.select(range(8)), HOW, 0, begin=True, more=True)
    fed = generator.feed(prompts.select(range(8, 20)), HOW, 1, begin=True, more=False)
    assert fed.rollouts is not None
    assert fed.rollouts.version == 1
    assert_equal(
        fed.rollouts.select(torch.argsort(fed.rows_n)),
        generator.generate(prompts.select(range(8, 20)), HOW, 1),
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
def test_slots_are_shared_by_the_sets_of_a_pipeline(pool: Pool, tp: int, pp: int) -> None:
    prompts = make_prompts(many_prompts(30))
    expected = cases.arrays(alone(QWEN2).generate(prompts, HOW, 3))
    for result in pool.run(Case(config=QWEN2, tp=tp, pp=pp), cases.generate, prompts, HOW, 7):
        for name in ("tokens", "prompt_lens", "lens", "stopped", "ids", "version"):
            assert np.array_equal(result[name], expected[name]), name
        np.testing.assert_allclose(result["logprobs"], expected["logprobs"], atol=LOGPROB_TOLERANCE)


def test_the_cache_has_as_many_rows_as_slots_and_tokens_of_the_longest_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[tuple[int, int]] = []
    step = DecodeForward.step

    def watched(self: DecodeForward, tokens_b: torch.Tensor) -> torch.Tensor | None:
        sizes.append((len(self.cache.pads_b), self.cache.capacity))
        return step(self, tokens_b)

    monkeypatch.setattr(DecodeForward, "step", watched)
    prompts, how = make_prompts(many_prompts(60)), replace(HOW, max_new_tokens=150, stop_token_ids=(3,))
    alone(SMALL, max_rows=6).generate(prompts, how, 0)
    rows, slots = zip(*sizes, strict=True)
    assert len(sizes) > 600  # far more steps than the cache has room for
    assert max(rows) == 6
    assert max(slots) <= 6 + 150 + 128


def test_waiting_rows_take_fewer_steps_than_sets_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = DecodeForward.step

    def watched(self: Any, tokens_b: torch.Tensor) -> torch.Tensor | None:
        steps.append(len(tokens_b))
        return step(self, tokens_b)

    monkeypatch.setattr(DecodeForward, "step", watched)
    prompts, how = make_prompts(many_prompts(64)), replace(HOW, max_new_tokens=100)
    rollouts = alone(SMALL, max_rows=8).generate(prompts, how, 0)
    taken = len(steps)
    lens = rollouts.batch.response_lens_b.tolist()
    longest_of_sets = sum(max(lens[at : at + 8]) - 1 for at in range(0, len(lens), 8))
    tokens = int((rollouts.batch.response_lens_b - 1).sum())
    assert taken < 0.75 * longest_of_sets
    assert sum(steps) < 1.35 * tokens  # slots whose rows are done, until others enter


def test_pads_are_finite_after_a_longer_prompt_came() -> None:
    cache = KVCache(
        num_layers=1, num_kv=1, head_dim=2, pads_b=torch.tensor([0, 1]), capacity=4, dtype=torch.float32
    )
    cache.length = 3
    cache.keys_lbkcd[:, :, :, :3] = 1.0
    cache.keep(None, 9, lead=-4)
    assert cache.length == 7
    assert cache.pads_b.tolist() == [4, 5]
    assert cache.keys_lbkcd[0, :, 0, :7, 0].tolist() == [[0.0] * 4 + [1.0] * 3] * 2
    cache.replace(torch.tensor([1]), torch.tensor([6]))
    assert cache.pads_b.tolist() == [4, 1]


def test_a_refresh_ends_what_runs() -> None:
    generator: TorchGenerator = alone(SMALL)
    prompts = make_prompts(many_prompts(8))
    generator.feed(prompts, HOW, 0, begin=True, more=True)
    generator.refresh()
    with pytest.raises(AssertionError, match="begun"):
        generator.feed(prompts, HOW, 0, begin=False, more=False)
