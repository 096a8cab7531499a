"""A missing reward is NaN, and its row counts for nothing."""

from __future__ import annotations

import math

import torch

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.grpo import grpo_advantages
from nereus.algorithms.missing import is_missing, rewards_tensor, without_missing
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.algorithms.surrogate import policy_loss


def test_none_becomes_nan_and_zero_stays_a_score() -> None:
    rewards_b = rewards_tensor([1.0, None, 0.0])
    assert rewards_b.dtype == torch.float32
    assert is_missing(rewards_b).tolist() == [False, True, False]
    assert is_missing(torch.tensor([[0.0, math.nan], [0.0, 1.0]])).tolist() == [True, False]


def test_a_row_with_a_missing_reward_adds_nothing_to_loss_gradient_or_counts() -> None:
    rewards_b = rewards_tensor([1.0, None, 0.0])
    group_b, full_bt = torch.zeros(3, dtype=torch.long), torch.ones(3, 4)

    def loss_and_gradient(rows: list[int]) -> tuple[float, torch.Tensor, GlobalCounts]:
        mask_bt = without_missing(full_bt, rewards_b)[rows]
        counts = GlobalCounts.from_mask(mask_bt)
        logprobs_bt = torch.linspace(-2, -1, 12).reshape(3, 4)[rows].requires_grad_()
        loss, _ = policy_loss(
            ClippedSurrogate(clip_low=0.2, clip_high=0.2),
            logprobs_bt,
            torch.full((3, 4), -1.5)[rows],
            grpo_advantages(rewards_b, group_b, full_bt)[rows],
            mask_bt,
            counts=counts,
            aggregation="seq-mean-token-mean",
        )
        loss.backward()
        assert logprobs_bt.grad is not None
        return loss.item(), logprobs_bt.grad, counts

    loss, gradient_bt, counts = loss_and_gradient([0, 1, 2])
    loss_without, gradient_without_bt, counts_without = loss_and_gradient([0, 2])
    assert counts == counts_without == GlobalCounts(num_rows=2, num_tokens=8, max_tokens=4)
    assert loss == loss_without != 0.0
    assert torch.equal(gradient_bt[[0, 2]], gradient_without_bt)
    assert torch.equal(gradient_bt[1], torch.zeros(4))
