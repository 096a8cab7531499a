"""Sampling: uniforms that depend on their key alone, exact frequencies, and the nucleus of the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from nereus.emu.batch import Sampling
from nereus.emu.engines.torch.sampling import descend, nucleus, num_draws, sample, uniforms, uniforms_at

SAMPLING = Sampling(max_new_tokens=8, seed=3, step=5)


def draw(ids: Tensor, *, first: int = 0, num: int = 1, draws: int = 1, of: Sampling = SAMPLING) -> Tensor:
    return uniforms(of, ids, first=first, num_positions=num, draws=draws)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frequencies_fit(counts_v: Tensor, probs_v: Tensor) -> bool:
    """Chi-square at one in a million, so that the fixed seed passes unless the rule is wrong."""
    assert counts_v[probs_v == 0].sum() == 0
    kept = probs_v > 0
    observed, expected = counts_v[kept].double(), probs_v[kept].double() * counts_v.sum()
    return float(stats.chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue) > 1e-6


def test_a_uniform_depends_on_its_key_alone() -> None:
    many = draw(torch.tensor([7, 100, -5, 2**40]), num=30, draws=3)
    one = draw(torch.tensor([2**40]), first=17, num=2, draws=1)
    assert torch.equal(many[17:19, :1, 3:], one)


@pytest.mark.parametrize("field", ["seed", "step"])
def test_other_seeds_and_steps_give_other_numbers(field: str) -> None:
    ids = torch.arange(100)
    other = replace(SAMPLING, **{field: 4})
    assert not bool((draw(ids, num=10) == draw(ids, num=10, of=other)).any())


def test_streams_do_not_meet() -> None:
    ids = torch.arange(100)
    one, two = (
        uniforms(SAMPLING, ids, first=0, num_positions=10, draws=1, stream=stream) for stream in (1, 2)
    )
    assert not bool((one == two).any())


def test_uniforms_are_uniform_and_independent() -> None:
    u = draw(torch.arange(500), num=100, draws=2)
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4
    for a, b in ((u[1:], u[:-1]), (u[:, :1], u[:, 1:]), (u[..., 1:], u[..., :-1])):
        # correlation of at least 50,000 independent pairs: standard deviation below 0.0045
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.02


@pytest.mark.parametrize("vocab_size", [5, 32, 40, 1500])
def test_frequencies_are_the_probabilities(vocab_size: int) -> None:
    probs_v = (2 * normal(vocab_size, seed=vocab_size)).softmax(-1)
    probs_v[1] = 0.0
    num = 60_000
    u = draw(torch.arange(num), first=3, draws=num_draws(vocab_size))[0]
    tokens = torch.cat([descend(probs_v.expand(10_000, -1), part) for part in u.split(10_000, dim=1)])
    assert frequencies_fit(torch.bincount(tokens, minlength=vocab_size), probs_v)


def test_the_number_of_draws_is_the_depth_of_the_descent() -> None:
    assert [num_draws(v) for v in (1, 32, 33, 1024, 1025, 151_936)] == [1, 1, 2, 2, 3, 4]
    with pytest.raises(ValueError, match="zip"):
        descend(torch.ones(1, 40), torch.zeros(1, 1))


@pytest.mark.parametrize("vocab_size", [7, 32, 100, 40_000])
def test_no_uniform_chooses_a_token_of_weight_zero(vocab_size: int) -> None:
    weights = torch.zeros(2, vocab_size)
    weights[0, vocab_size // 2] = 1e-30
    weights[1, [1, vocab_size - 2]] = torch.tensor([1e20, 1e-20])
    for u in (0.0, 0.5, 1.0 - 2.0**-52):
        tokens = descend(weights, torch.full((num_draws(vocab_size), 2), u, dtype=torch.float64))
        assert bool((weights.gather(1, tokens[:, None]) > 0).all())


def test_rounding_noise_moves_few_samples() -> None:
    """One sum over the vocabulary moves 50 in a million at this noise, the descent 8."""
    logits = 4 * normal(20_000, 512)
    noisy = logits + 2e-6 * normal(20_000, 512, seed=1)
    u = draw(torch.arange(20_000), draws=2)[0]
    moved = descend(logits.softmax(-1), u) != descend(noisy.softmax(-1), u)
    assert int(moved.sum()) <= 2


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([3, 50, 300, 5000]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999]),
)
def test_the_nucleus_is_that_of_transformers(seed: int, vocab_size: int, spread: float, top_p: float) -> None:
    logits = spread * normal(3, vocab_size, seed=seed)
    weights = logits.exp()
    kept = nucleus(weights, weights.sum(-1), top_p)
    theirs = TopPLogitsWarper(top_p)(None, logits) > -torch.inf  # type: ignore[arg-type]
    assert torch.equal(kept[kept > 0], weights[kept > 0])
    # Cumulative sums in float32 and float64 may differ about the token at the border.
    assert int(((kept > 0) != theirs).sum(-1).max()) <= 1
    share = kept.sum(-1) / weights.sum(-1)
    smallest = torch.where(kept > 0, kept, torch.inf).amin(-1) / weights.sum(-1)
    assert bool((share >= top_p - 1e-5).all())
    assert bool((share - smallest <= top_p + 1e-5).all())


def test_a_rows_nucleus_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.cat([10 * normal(2, 6000), 0.01 * normal(2, 6000, seed=1)])  # peaked and flat rows
    weights = logits.exp()
    together = nucleus(weights, weights.sum(-1), 0.9)
    for row in range(4):
        alone = nucleus(weights[row : row + 1], weights[row : row + 1].sum(-1), 0.9)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_tempered_distribution_before_top_p(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = (3 * normal(50, 100)).to(dtype)
    expected = (logits.float() / temperature).log_softmax(-1)
    u = draw(torch.arange(50), draws=2)[0]
    for top_p in (1.0, 0.7):
        tokens, logprobs = sample(logits.clone(), u, temperature=temperature, top_p=top_p)
        torch.testing.assert_close(logprobs, expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)


def test_top_p_narrows_the_choice() -> None:
    probs_v = torch.tensor([0.5, 0.3, 0.15, 0.05])
    u = draw(torch.arange(30_000))[0]
    tokens, _ = sample(probs_v.log().repeat(30_000, 1), u, top_p=0.75)
    wanted = torch.tensor([0.5, 0.3, 0.0, 0.0]) / 0.8
    assert frequencies_fit(torch.bincount(tokens, minlength=4), wanted)


def test_greedy_rows_take_the_largest_logit_and_leave_the_others() -> None:
    logits = normal(6, 40)
    u = draw(torch.arange(6), draws=2)[0]
    greedy = torch.tensor([True, False] * 3)
    plain, _ = sample(logits.clone(), u)
    mixed, logprobs = sample(logits.clone(), u, greedy)
    everywhere, _ = sample(logits.clone(), None)
    assert torch.equal(mixed, torch.where(greedy, logits.argmax(-1), plain))
    assert torch.equal(everywhere, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, mixed[:, None])[:, 0])


def test_rows_at_different_positions_draw_what_they_would_draw_together() -> None:
    ids, positions = torch.tensor([4, 4, 9]), torch.tensor([0, 6, 3])
    apart = uniforms_at(SAMPLING, ids, positions, draws=2)
    together = draw(ids, num=7, draws=2)
    assert torch.equal(apart, torch.stack([together[at, :, row] for row, at in enumerate(positions)], dim=1))


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_top_k_then_top_p_choose_among_the_tokens_that_transformers_leaves(top_p: float) -> None:
    logits_bv, num = normal(4, 50, seed=2), 4000
    left_bv = TopKLogitsWarper(7)(None, logits_bv.clone())
    left_bv = TopPLogitsWarper(top_p)(None, left_bv) if top_p < 1 else left_bv
    for logits_v, left_v in zip(logits_bv, left_bv, strict=True):
        rows_bv = logits_v.repeat(num, 1)
        uniforms_db = draw(torch.arange(num), draws=num_draws(50))[0]
        tokens_b, logprobs_b = sample(rows_bv, uniforms_db, top_k=7, top_p=top_p)
        assert frequencies_fit(torch.bincount(tokens_b, minlength=50), left_v.softmax(dim=-1))
        torch.testing.assert_close(logprobs_b, logits_v.log_softmax(dim=-1)[tokens_b])
