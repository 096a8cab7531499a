"""CISPO: clipped weights that keep every token's gradient."""

from __future__ import annotations

import math

import pytest
import torch

from nereus.algorithms.aggregation import GlobalCounts
from nereus.algorithms.cispo import ClippedWeightSurrogate
from nereus.algorithms.surrogate import policy_loss


@pytest.mark.parametrize(
    ("ratio", "weight"), [(2.0, 1.2), (0.5, 0.9), (1.1, 1.1)], ids=["above", "below", "inside"]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_keeps_its_gradient_with_the_clipped_ratio_as_weight(
    ratio: float, weight: float, advantage: float
) -> None:
    logprobs_bt = torch.tensor([[math.log(ratio)]], requires_grad=True)
    ones_bt = torch.ones(1, 1)
    loss, stats = policy_loss(
        ClippedWeightSurrogate(clip_low=0.1, clip_high=0.2),
        logprobs_bt,
        torch.zeros(1, 1),
        advantage * ones_bt,
        ones_bt,
        counts=GlobalCounts.from_mask(ones_bt),
        aggregation="token-mean",
    )
    loss.backward()
    assert logprobs_bt.grad is not None
    assert logprobs_bt.grad.item() == pytest.approx(-weight * advantage)
    assert stats.clip_fraction.item() == float(ratio != weight)
