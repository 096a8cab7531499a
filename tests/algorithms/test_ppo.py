"""Clipped losses: golden values and gradients, dual clip, empty shares, statistics that add up."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor
from verl_golden import Golden

from nereus.algorithms.aggregation import AGGREGATIONS, Aggregation, GlobalCounts
from nereus.algorithms.entropy import entropy_loss, entropy_of_logits
from nereus.algorithms.ppo import ClippedSurrogate, value_loss
from nereus.algorithms.surrogate import PolicyStats, policy_loss


def golden_policy_loss(
    golden: Golden, logprobs_bt: Tensor, aggregation: Aggregation, rows: slice | list[int] = slice(None)
) -> tuple[Tensor, PolicyStats]:
    mask_bt = golden.mask_bt
    return policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        logprobs_bt[rows],
        golden.input("old_log_prob")[rows],
        torch.tensor(golden["grpo_stdTrue"])[rows],
        mask_bt[rows],
        counts=GlobalCounts.from_mask(mask_bt),
        aggregation=aggregation,
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_policy_loss_and_gradient_equal_verl(golden: Golden, aggregation: Aggregation) -> None:
    expected = golden[f"ppo_clip0.2_dual3_{aggregation}"]
    logprobs_bt = golden.input("log_prob").requires_grad_()
    loss, stats = golden_policy_loss(golden, logprobs_bt, aggregation)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(logprobs_bt.grad, torch.tensor(expected["grad"]), atol=1e-6, rtol=0)
    assert stats.clip_fraction.item() == pytest.approx(expected["metrics"]["actor/pg_clipfrac"], abs=1e-6)
    assert stats.approx_kl.item() == pytest.approx(expected["metrics"]["actor/ppo_kl"], abs=1e-6)
    assert stats.dual_clip_fraction.item() == expected["metrics"]["actor/pg_clipfrac_lower"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_policy_loss_gradient_and_statistics_add_up_over_any_cut(
    golden: Golden, aggregation: Aggregation
) -> None:
    whole_bt, parts_bt = (golden.input("log_prob").requires_grad_() for _ in range(2))
    whole, whole_stats = golden_policy_loss(golden, whole_bt, aggregation)
    whole.backward()
    results = [golden_policy_loss(golden, parts_bt, aggregation, rows) for rows in ([0], [1, 3], [2])]
    for loss, _ in results:
        loss.backward()
    assert sum(loss.item() for loss, _ in results) == pytest.approx(whole.item(), abs=1e-6)
    torch.testing.assert_close(parts_bt.grad, whole_bt.grad, atol=1e-7, rtol=0)
    total = reduce(add, (stats for _, stats in results))
    for name, value in whole_stats.by_name().items():
        assert total.by_name()[name].item() == pytest.approx(value.item(), abs=1e-6)


def test_value_loss_equals_verl(golden: Golden) -> None:
    expected = golden["value_loss_clip0.2_token-mean"]
    values_bt = golden.input("vpreds").requires_grad_()
    loss, stats = value_loss(
        values_bt,
        golden.input("values"),
        torch.tensor(golden[expected["returns_from"]]["returns"]),
        golden.mask_bt,
        clip=0.2,
        counts=GlobalCounts.from_mask(golden.mask_bt),
        aggregation="token-mean",
    )
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert stats.clip_fraction.item() == pytest.approx(expected["clipfrac"], abs=1e-6)


def one_token(log_ratio: float, advantage: float, dual_clip: float | None) -> tuple[float, float, float]:
    """Loss, gradient and dual clip fraction of a single token."""
    logprobs_bt = torch.tensor([[log_ratio]], requires_grad=True)
    ones_bt = torch.ones(1, 1)
    loss, stats = policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip),
        logprobs_bt,
        torch.zeros(1, 1),
        advantage * ones_bt,
        ones_bt,
        counts=GlobalCounts.from_mask(ones_bt),
        aggregation="token-mean",
    )
    loss.backward()
    assert logprobs_bt.grad is not None
    return loss.item(), logprobs_bt.grad.item(), stats.dual_clip_fraction.item()


def test_clip_bounds_are_separate_and_stop_the_gradient() -> None:
    assert one_token(math.log(1.5), 1.0, None)[:2] == pytest.approx((-1.28, 0.0))
    assert one_token(math.log(0.5), -1.0, None)[:2] == pytest.approx((0.8, 0.0))
    assert one_token(math.log(1.25), 1.0, None)[:2] == pytest.approx((-1.25, -1.25))


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_stops_its_gradient() -> None:
    assert one_token(math.log(10.0), -1.0, None)[:2] == pytest.approx((10.0, 10.0))
    assert one_token(math.log(10.0), -1.0, 3.0) == pytest.approx((3.0, 0.0, 1.0))
    assert one_token(math.log(2.0), -1.0, 3.0) == pytest.approx((2.0, 2.0, 0.0))


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    loss, _, _ = one_token(1000.0, -1.0, None)
    assert loss == pytest.approx(math.exp(20.0), rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_all_masked_micro_batch_of_nan_gives_loss_0_and_gradient_0(aggregation: Aggregation) -> None:
    nan_bt = torch.full((2, 3), math.nan)
    counts = GlobalCounts(num_rows=3, num_tokens=9, max_tokens=3)
    logprobs_bt, values_bt = nan_bt.clone().requires_grad_(), nan_bt.clone().requires_grad_()
    policy, policy_stats = policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        logprobs_bt,
        nan_bt,
        nan_bt,
        torch.zeros(2, 3),
        counts=counts,
        aggregation=aggregation,
    )
    value, value_stats = value_loss(
        values_bt, nan_bt, nan_bt, torch.zeros(2, 3), clip=0.2, counts=counts, aggregation=aggregation
    )
    (policy + value).backward()
    assert policy.item() == 0.0
    assert value.item() == 0.0
    for gradient in (logprobs_bt.grad, values_bt.grad):
        assert gradient is not None
        assert torch.equal(gradient, torch.zeros(2, 3))
    assert all(x.item() == 0.0 for x in [*policy_stats.by_name().values(), *value_stats.by_name().values()])


def test_nan_at_masked_positions_reaches_neither_loss_nor_gradient() -> None:
    mask_bt = torch.tensor([[1, 0]])
    logprobs_bt = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    other_bt = torch.tensor([[-1.0, math.nan]])
    loss, _ = policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        logprobs_bt,
        other_bt,
        -other_bt,
        mask_bt,
        counts=GlobalCounts.from_mask(mask_bt),
        aggregation="token-mean",
    )
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs_bt.grad is not None
    assert logprobs_bt.grad.tolist() == [[-1.0, 0.0]]


def test_value_loss_without_clip_is_half_the_squared_error() -> None:
    ones_bt = torch.ones(1, 2)
    loss, stats = value_loss(
        torch.tensor([[1.0, 3.0]]), 9 * ones_bt, 0 * ones_bt, ones_bt, clip=None,
        counts=GlobalCounts.from_mask(ones_bt), aggregation="token-mean",
    )  # fmt: skip
    assert loss.item() == pytest.approx(0.5 * (1 + 9) / 2)
    assert stats.value_mean.item() == pytest.approx(2.0)
    assert stats.clip_fraction.item() == 0.0


def test_entropy_of_a_uniform_distribution_and_its_sign_in_the_loss() -> None:
    entropy_bt = entropy_of_logits(torch.zeros(1, 2, 8))
    torch.testing.assert_close(entropy_bt, torch.full((1, 2), math.log(8)))
    mask_bt = torch.tensor([[1, 0]])
    loss = entropy_loss(entropy_bt, mask_bt, counts=GlobalCounts.from_mask(mask_bt), aggregation="token-mean")
    assert loss.item() == pytest.approx(-math.log(8))
