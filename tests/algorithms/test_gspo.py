"""GSPO: one ratio a response, clipped as one."""

from __future__ import annotations

import math

import pytest
import torch

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.gspo import SequenceSurrogate
from nereus.algorithms.surrogate import policy_loss


def row(log_ratios: list[float], advantage: float) -> tuple[float, list[float], float]:
    """Loss, gradient and clip fraction of one response."""
    logprobs_bt = torch.tensor([log_ratios], requires_grad=True)
    mask_bt = torch.ones_like(logprobs_bt)
    loss, stats = policy_loss(
        SequenceSurrogate(clip_low=0.1, clip_high=0.2),
        logprobs_bt,
        torch.zeros_like(mask_bt),
        advantage * mask_bt,
        mask_bt,
        counts=GlobalCounts.from_mask(mask_bt),
        aggregation="seq-mean-token-mean",
    )
    loss.backward()
    assert logprobs_bt.grad is not None
    return loss.item(), logprobs_bt.grad[0].tolist(), stats.clip_fraction.item()


def test_tokens_that_cancel_out_are_not_clipped() -> None:
    """PPO would clip both: 2 and 1/2 lie outside [.9, 1.2]. Their geometric mean is 1."""
    loss, gradient, clipped = row([math.log(2.0), -math.log(2.0)], 1.0)
    assert loss == pytest.approx(-1.0)
    assert gradient == pytest.approx([-0.5, -0.5])
    assert clipped == 0.0


def test_a_clipped_response_loses_the_gradient_of_all_its_tokens() -> None:
    loss, gradient, clipped = row([math.log(2.0), 0.0], 1.0)
    assert (loss, clipped) == pytest.approx((-1.2, 1.0))
    assert gradient == [0.0, 0.0]


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    loss, _, _ = row([500.0], -1.0)
    assert loss == pytest.approx(math.exp(10.0))
