"""What DAPO adds: which groups teach, and the soft penalty of overlong responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.algorithms.dapo import has_spread, overlong_penalty
from nereus.algorithms.grpo import grpo_advantages
from nereus.algorithms.missing import rewards_tensor


def test_groups_of_equal_rewards_do_not_teach() -> None:
    rewards_b = rewards_tensor([1, 1, 1, 0, 0, 0, 0.5, None, 0.5, None, None, None])
    group_b = torch.arange(4).repeat_interleave(3)
    assert has_spread(rewards_b, group_b).tolist() == [False] * 3 + [False] * 3 + [False] * 6
    rewards_b[4] = 1e-6
    assert has_spread(rewards_b, group_b).tolist() == [False] * 3 + [True] * 3 + [False] * 6


def test_rounding_makes_no_spread() -> None:
    assert not has_spread(torch.full((8,), 0.1), torch.zeros(8, dtype=torch.long)).any()


@settings(max_examples=50, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=12),
    data=st.data(),
)
def test_a_group_has_spread_exactly_when_grpo_gives_it_an_advantage(
    rewards: list[float | None], data: st.DataObject
) -> None:
    size = len(rewards)
    group_b = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    rewards_b = rewards_tensor(rewards)
    advantages_bt = grpo_advantages(rewards_b, group_b, torch.ones(size, 1))
    spread_b = has_spread(rewards_b, group_b)
    for group in group_b.unique().tolist():
        rows = group_b == group
        assert bool(spread_b[rows].any()) == bool(spread_b[rows].all()) == bool(advantages_bt[rows].any())


def test_the_penalty_grows_linearly_in_the_last_part_only() -> None:
    lengths_b = torch.tensor([1, 80, 90, 100, 110])
    got_b = overlong_penalty(lengths_b, max_tokens=100, buffer_tokens=20)
    assert got_b.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    half_b = overlong_penalty(lengths_b, max_tokens=100, buffer_tokens=20, factor=0.5)
    assert half_b.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -0.5])
