"""Group-relative advantages: golden values, missing rewards, groups of one, groups without spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl_golden import Golden

from nereus.algorithms.grpo import grpo_advantages
from nereus.algorithms.missing import rewards_tensor


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_to_verl_but_for_groups_of_one(golden: Golden, normalize_std: bool) -> None:
    mask_bt = golden.mask_bt
    got_bt = grpo_advantages(golden.input("score"), golden.group_b, mask_bt, normalize_std=normalize_std)
    expected_bt = torch.tensor(golden[f"grpo_std{normalize_std}"])
    alone_b = torch.tensor([False, False, True, True])  # groups b and c hold one response each
    torch.testing.assert_close(got_bt[~alone_b], expected_bt[~alone_b], atol=1e-6, rtol=0)
    assert torch.equal(got_bt[alone_b], torch.zeros(2, 6))  # verl: the raw reward


def test_missing_rewards_leave_the_baseline_and_get_zero() -> None:
    rewards_b = rewards_tensor([1.0, None, 0.0, None])
    advantages_bt = grpo_advantages(
        rewards_b, torch.zeros(4, dtype=torch.long), torch.ones(4, 2), normalize_std=False
    )
    assert advantages_bt.tolist() == [[0.5, 0.5], [0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]


def test_missing_rewards_do_not_change_the_spread_of_the_others() -> None:
    group_b, mask_bt = torch.tensor([7, 7, 7, 7]), torch.ones(4, 1)
    with_missing = grpo_advantages(rewards_tensor([1.0, None, 0.0, None]), group_b, mask_bt)
    without = grpo_advantages(rewards_tensor([1.0, 0.0]), group_b[:2], mask_bt[:2])
    torch.testing.assert_close(with_missing[[0, 2]], without)


def test_a_group_with_one_present_reward_teaches_nothing() -> None:
    advantages_bt = grpo_advantages(rewards_tensor([None, 5.0]), torch.tensor([3, 3]), torch.ones(2, 2))
    assert torch.equal(advantages_bt, torch.zeros(2, 2))


def test_equal_rewards_give_no_advantage_from_rounding() -> None:
    """In float32, 8 rewards of 0.1 have a mean that is off by 1 ulp, which over eps 1e-6 is 0.007."""
    advantages_bt = grpo_advantages(torch.full((8,), 0.1), torch.zeros(8, dtype=torch.long), torch.ones(8, 1))
    assert advantages_bt.abs().max().item() < 1e-9


@settings(max_examples=40, deadline=None)
@given(groups=st.lists(st.integers(-3, 3), min_size=1, max_size=16), seed=st.integers(0, 99), data=st.data())
def test_order_of_rows_does_not_matter_and_groups_sum_to_zero(
    groups: list[int], seed: int, data: st.DataObject
) -> None:
    group_b = torch.tensor(groups)
    rewards_b = torch.rand(len(groups), generator=torch.Generator().manual_seed(seed))
    mask_bt = torch.ones(len(groups), 1)
    advantages_bt = grpo_advantages(rewards_b, group_b, mask_bt)
    shuffled = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    again_bt = grpo_advantages(rewards_b[shuffled], group_b[shuffled], mask_bt)
    torch.testing.assert_close(again_bt, advantages_bt[shuffled])
    for group in set(groups):
        assert advantages_bt[group_b == group].sum().item() == pytest.approx(0.0, abs=1e-5)  # float32 sum
