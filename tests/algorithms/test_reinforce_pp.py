"""REINFORCE++: golden values, gaps, and the form with a group baseline."""

from __future__ import annotations

import pytest
import torch
from verl_golden import Golden

from nereus.algorithms.aggregation import whiten
from nereus.algorithms.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages


def test_equal_to_verl(golden: Golden) -> None:
    got_bt = reinforce_pp_advantages(golden.input("token_level_scores"), golden.mask_bt, gamma=1.0)
    expected_bt = torch.tensor(golden["reinforce_pp"]["adv"])
    torch.testing.assert_close(got_bt, expected_bt, atol=1e-5, rtol=0)  # whitened, float32


def test_baseline_form_equals_verl_on_its_centred_rewards(golden: Golden) -> None:
    """verl keeps the raw reward of a group of one; its groups b and c hold one response each."""
    centred_b = torch.tensor([0.5, -0.5, 0.5, -1.0])
    expected_bt = torch.tensor(golden["reinforce_pp_baseline"])
    got_bt = whiten(centred_b[:, None].expand(4, 6), golden.mask_bt)
    torch.testing.assert_close(got_bt, expected_bt, atol=1e-5, rtol=0)
    # The same through the function, every response in one group: then centring only shifts, and whitening
    # takes the shift out again.
    one_group_b = torch.zeros(4, dtype=torch.long)
    again_bt = reinforce_pp_baseline_advantages(centred_b, one_group_b, golden.mask_bt)
    torch.testing.assert_close(again_bt, expected_bt, atol=1e-5, rtol=0)


def test_baseline_form_compares_within_groups_and_scales_by_the_batch() -> None:
    rewards_b = torch.tensor([1.0, 0.0, 0.1, 0.0])
    advantages_bt = reinforce_pp_baseline_advantages(rewards_b, torch.tensor([0, 0, 1, 1]), torch.ones(4, 1))
    centred = torch.tensor([0.5, -0.5, 0.05, -0.05])
    torch.testing.assert_close(advantages_bt[:, 0], centred / centred.std(), atol=1e-5, rtol=1e-5)


def test_a_group_of_one_and_a_missing_reward_have_no_baseline_to_beat() -> None:
    rewards_b = torch.tensor([1.0, 0.0, 7.0, torch.nan])
    mask_bt = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    advantages_bt = reinforce_pp_baseline_advantages(rewards_b, torch.tensor([0, 0, 1, 0]), mask_bt)
    assert advantages_bt[:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)


def test_discount_counts_produced_tokens_only() -> None:
    rewards_bt = torch.tensor([[0.0, 9.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    mask_bt = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    got_bt = reinforce_pp_advantages(rewards_bt, mask_bt, gamma=0.5)
    returns_bt = torch.tensor([[0.25, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(got_bt, whiten(returns_bt, mask_bt))
