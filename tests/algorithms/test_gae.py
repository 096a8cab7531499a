"""Advantages over produced tokens only: golden values, gaps, padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl_golden import Golden

from nereus.algorithms.aggregation import whiten
from nereus.algorithms.gae import gae


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_equal_to_verl(golden: Golden, gamma: float, lam: float) -> None:
    expected = golden[f"gae_gamma{gamma}_lam{lam}"]
    rewards_bt = torch.tensor(golden["token_level_rewards_kl_beta0.05_k1"])
    mask_bt = golden.mask_bt
    advantages_bt, returns_bt = gae(rewards_bt, golden.input("values"), mask_bt, gamma=gamma, lam=lam)
    set_bt = mask_bt.bool()
    torch.testing.assert_close(
        returns_bt[set_bt], torch.tensor(expected["returns"])[set_bt], atol=1e-6, rtol=0
    )
    torch.testing.assert_close(  # whitened: one more division by a float32 deviation
        whiten(advantages_bt, mask_bt)[set_bt],
        torch.tensor(expected["advantages_whitened"])[set_bt],
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("intruder", [100.0, math.nan])
def test_a_value_at_a_masked_position_has_no_influence(intruder: float) -> None:
    mask_bt = torch.tensor([[1, 1, 0, 0, 1, 0]])
    rewards_bt, values_bt = torch.tensor([[0.1, 0.2, 0, 0, 1.0, 0]]), torch.tensor([[0.5, 0.4, 0, 0, 0.3, 0]])
    loud_values_bt, loud_rewards_bt = values_bt.clone(), rewards_bt.clone()
    loud_values_bt[mask_bt == 0] = intruder
    loud_rewards_bt[mask_bt == 0] = intruder
    quiet = gae(rewards_bt, values_bt, mask_bt, gamma=0.9, lam=0.8)
    loud = gae(loud_rewards_bt, loud_values_bt, mask_bt, gamma=0.9, lam=0.8)
    assert torch.equal(quiet[0], loud[0])
    assert torch.equal(quiet[1], loud[1])
    assert torch.isfinite(loud[0]).all()


@settings(max_examples=40, deadline=None)
@given(
    present=st.lists(st.booleans(), min_size=1, max_size=12),
    gamma=st.floats(0.5, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_gaps_are_as_if_they_were_not_there(present: list[bool], gamma: float, lam: float, seed: int) -> None:
    """The row with its unset positions removed gives the same numbers: the definition, without a mask."""
    generator = torch.Generator().manual_seed(seed)
    rewards_bt, values_bt = torch.randn(2, 1, len(present), generator=generator, dtype=torch.float64)
    mask_bt = torch.tensor([present])
    with_gaps = gae(rewards_bt, values_bt, mask_bt, gamma=gamma, lam=lam)
    rewards, values = rewards_bt[mask_bt], values_bt[mask_bt]
    expected: list[float] = []
    advantage, next_value = 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        expected.insert(0, advantage)
    wanted = torch.tensor(expected, dtype=torch.float64)
    # Computed in float32 by definition: dtype's own tolerance of sums of at most 12 terms.
    torch.testing.assert_close(with_gaps[0][mask_bt], wanted.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(with_gaps[1][mask_bt].float(), (wanted + values).float(), rtol=1e-5, atol=1e-5)
    assert with_gaps[0][~mask_bt].abs().sum() == 0


def test_lambda_1_gamma_1_gives_the_return_minus_the_value() -> None:
    rewards_bt, values_bt = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.5, 0.9]])
    advantages_bt, returns_bt = gae(rewards_bt, values_bt, torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns_bt, torch.ones(1, 3))
    torch.testing.assert_close(advantages_bt, 1.0 - values_bt)
