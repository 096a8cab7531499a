"""Adaptive beta: the rule, and the statistic that it follows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.algorithms.kl_controller import adapted_beta, mean_kl


def test_beta_follows_the_divergence_and_at_most_by_a_fifth_a_horizon() -> None:
    rule = {"target": 0.1, "horizon_rows": 1000, "num_rows": 100}
    assert adapted_beta(0.5, 0.1, **rule) == 0.5
    assert adapted_beta(0.5, 0.11, **rule) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    assert adapted_beta(0.5, 9.0, **rule) == pytest.approx(0.5 * (1 + 0.2 * 0.1))
    assert adapted_beta(0.5, 0.0, **rule) == pytest.approx(0.5 * (1 - 0.2 * 0.1))


@given(
    beta=st.floats(1e-6, 10),
    kl=st.floats(-1, 100),
    target=st.floats(1e-3, 10),
    num_rows=st.integers(1, 100),
)
def test_beta_stays_positive_and_moves_towards_the_target(
    beta: float, kl: float, target: float, num_rows: int
) -> None:
    after = adapted_beta(beta, kl, target=target, horizon_rows=100, num_rows=num_rows)
    assert after > 0
    assert (after >= beta) if kl >= target else (after <= beta)


def test_the_statistic_weighs_rows_alike_and_ignores_what_does_not_count() -> None:
    logprobs_bt = torch.tensor([[1.0, 3.0], [4.0, torch.nan], [torch.nan, torch.nan]])
    mask_bt = torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert mean_kl(logprobs_bt, torch.zeros(3, 2), mask_bt, "k1") == pytest.approx((2.0 + 4.0) / 2)
    assert mean_kl(logprobs_bt, torch.zeros(3, 2), torch.zeros(3, 2), "k1") == 0.0
