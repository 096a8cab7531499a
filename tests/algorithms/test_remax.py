"""ReMax: golden values on set positions, missing rewards and missing baselines."""

from __future__ import annotations

import math

import torch
from verl_golden import Golden

from nereus.algorithms.missing import without_missing
from nereus.algorithms.remax import remax_advantages


def test_equal_to_verl_on_set_positions(golden: Golden) -> None:
    mask_bt, set_bt = golden.mask_bt, golden.mask_bt.bool()
    baselines_b = torch.tensor(golden["remax"]["baseline"])
    got_bt = remax_advantages(golden.input("token_level_scores"), baselines_b, mask_bt)
    torch.testing.assert_close(
        got_bt[set_bt], torch.tensor(golden["remax"]["adv"])[set_bt], atol=1e-6, rtol=0
    )
    assert got_bt[~set_bt].abs().sum() == 0  # verl leaves the return inside a gap


def test_a_reward_before_a_position_has_no_part_in_its_advantage() -> None:
    rewards_bt = torch.tensor([[1.0, 2.0, 4.0]])
    advantages_bt = remax_advantages(rewards_bt, torch.tensor([0.5]), torch.ones(1, 3))
    assert advantages_bt.tolist() == [[6.5, 5.5, 3.5]]


def test_rows_with_a_missing_reward_or_baseline_get_zeros() -> None:
    rewards_bt = torch.tensor([[0.0, 1.0], [0.0, math.nan], [0.0, 1.0]])
    baselines_b = torch.tensor([0.25, 0.0, math.nan])
    mask_bt = torch.ones(3, 2)
    advantages_bt = remax_advantages(rewards_bt, baselines_b, mask_bt)
    assert advantages_bt.tolist() == [[0.75, 0.75], [0.0, 0.0], [0.0, 0.0]]
    kept_bt = without_missing(without_missing(mask_bt, rewards_bt), baselines_b)
    assert kept_bt.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_nan_outside_the_mask_is_not_a_missing_reward() -> None:
    advantages_bt = remax_advantages(
        torch.tensor([[1.0, math.nan]]), torch.tensor([0.0]), torch.tensor([[1, 0]])
    )
    assert advantages_bt.tolist() == [[1.0, 0.0]]
