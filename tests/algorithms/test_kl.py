"""KL estimators, the penalty in the reward, the term of the loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from verl_golden import Golden

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.kl import KlKind, KlLossKind, kl_estimate, kl_in_reward, kl_loss, last_set
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.algorithms.surrogate import policy_loss


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_estimators_equal_verl(golden: Golden, kind: KlKind) -> None:
    got_bt = kl_estimate(golden.input("old_log_prob"), golden.input("ref_log_prob"), kind)
    torch.testing.assert_close(got_bt, torch.tensor(golden["kl"][kind]), atol=1e-6, rtol=0)


def test_k3_is_clamped_at_10_as_in_verl(golden: Golden) -> None:
    far = kl_estimate(torch.tensor([-30.0]), torch.tensor([0.0]), "k3")
    assert far.item() == golden["edge_k3_clamped_at_10"]


@pytest.mark.parametrize(("kind", "value_of"), [("k1+", "k1"), ("k3+", "k3")])
def test_straight_through_kinds_have_the_gradient_of_k2(kind: KlKind, value_of: KlKind) -> None:
    logprobs_bt = torch.tensor([[-1.0, -0.2, -3.0]], requires_grad=True)
    reference_bt = torch.tensor([[-0.5, -0.9, -2.0]])
    estimate_bt = kl_estimate(logprobs_bt, reference_bt, kind)
    estimate_bt.sum().backward()
    torch.testing.assert_close(
        estimate_bt.detach(), kl_estimate(logprobs_bt, reference_bt, value_of).detach()
    )
    assert logprobs_bt.grad is not None
    torch.testing.assert_close(logprobs_bt.grad, (logprobs_bt - reference_bt).detach())


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")  # type: ignore[arg-type]


def test_penalised_rewards_equal_verl(golden: Golden) -> None:
    got_bt = kl_in_reward(
        golden.input("score"),
        golden.input("old_log_prob"),
        golden.input("ref_log_prob"),
        golden.mask_bt,
        beta=0.05,
        kind="k1",
    )
    expected_bt = torch.tensor(golden["token_level_rewards_kl_beta0.05_k1"])
    torch.testing.assert_close(got_bt, expected_bt, atol=1e-6, rtol=0)


def test_score_lands_on_the_last_set_position_and_nan_outside_has_no_influence() -> None:
    mask_bt = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    logprobs_bt = torch.tensor([[-1.0, math.nan, -2.0, math.nan], [math.nan] * 4])
    rewards_bt = kl_in_reward(
        torch.tensor([3.0, 5.0]), logprobs_bt, torch.zeros(2, 4), mask_bt, beta=0.1, kind="k1"
    )
    torch.testing.assert_close(rewards_bt, torch.tensor([[0.1, 0.0, 3.2, 0.0], [0.0] * 4]))
    assert last_set(mask_bt).tolist() == [[False, False, True, False], [False] * 4]


def test_a_missing_score_stays_missing() -> None:
    zeros_bt = torch.zeros(1, 3)
    rewards_bt = kl_in_reward(
        torch.tensor([math.nan]), zeros_bt, zeros_bt, torch.ones(1, 3), beta=0.1, kind="k1"
    )
    assert math.isnan(rewards_bt.sum().item())
    assert rewards_bt[0, :2].tolist() == [0.0, 0.0]


def test_kl_loss_is_the_aggregated_estimate_and_ignores_nan_outside_the_mask() -> None:
    logprobs_bt = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    mask_bt = torch.tensor([[1, 1, 0]])
    counts = GlobalCounts.from_mask(mask_bt)
    loss = kl_loss(
        logprobs_bt, torch.zeros(1, 3), mask_bt, kind="k2", counts=counts, aggregation="token-mean"
    )
    loss.backward()
    assert loss.item() == pytest.approx((0.5 + 2.0) / 2)
    assert logprobs_bt.grad is not None
    assert logprobs_bt.grad.tolist() == [[-0.5, -1.0, 0.0]]


@pytest.mark.parametrize(
    ("key", "kind"), [("dapo_beta0.1_k3", "k3"), ("dapo_beta0.1_k3_biascorr", "k3-unbiased")]
)
def test_policy_loss_with_kl_equals_trl(
    golden: Golden, trl: dict[str, Any], key: str, kind: KlLossKind
) -> None:
    logprobs_bt = golden.input("log_prob").requires_grad_()
    old_bt, mask_bt = golden.input("old_log_prob"), golden.mask_bt
    counts = GlobalCounts.from_mask(mask_bt)
    loss, _ = policy_loss(
        ClippedSurrogate(clip_low=0.2, clip_high=0.2),
        logprobs_bt,
        old_bt,
        torch.tensor(golden["grpo_stdTrue"]),
        mask_bt,
        counts=counts,
        aggregation="token-mean",
    )
    term = kl_loss(
        logprobs_bt,
        golden.input("ref_log_prob"),
        mask_bt,
        kind=kind,
        counts=counts,
        aggregation="token-mean",
        old_logprobs_bt=old_bt,
    )
    loss = loss + 0.1 * term
    loss.backward()
    assert loss.item() == pytest.approx(trl[key]["loss"], abs=1e-6)
    torch.testing.assert_close(logprobs_bt.grad, torch.tensor(trl[key]["grad"]), atol=1e-6, rtol=0)


def test_on_policy_the_unbiased_k3_has_the_gradient_of_k2_and_plain_k3_another() -> None:
    def gradient(kind: KlLossKind) -> list[float]:
        logprobs_bt = torch.tensor([[-1.0, -0.2, -3.0]], requires_grad=True)
        ones_bt = torch.ones(1, 3)
        kl_loss(
            logprobs_bt,
            torch.tensor([[-0.5, -0.9, -2.0]]),
            ones_bt,
            kind=kind,
            counts=GlobalCounts.from_mask(ones_bt),
            aggregation="token-sum",
            old_logprobs_bt=logprobs_bt.detach(),
        ).backward()
        assert logprobs_bt.grad is not None
        return list(logprobs_bt.grad[0].tolist())

    assert gradient("k3-unbiased") == pytest.approx(gradient("k2"), abs=1e-6)
    assert gradient("k3") != pytest.approx(gradient("k2"), abs=1e-2)
