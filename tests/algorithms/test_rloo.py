"""Leave-one-out advantages: golden values and the definition."""

from __future__ import annotations

import torch
from verl_golden import Golden

from nereus.algorithms.missing import rewards_tensor
from nereus.algorithms.rloo import rloo_advantages


def test_equal_to_verls_vectorised_form(golden: Golden) -> None:
    got_bt = rloo_advantages(golden.input("score"), golden.group_b, golden.mask_bt)
    torch.testing.assert_close(got_bt, torch.tensor(golden["rloo_vectorized"]), atol=1e-6, rtol=0)


def test_each_reward_is_compared_with_the_mean_of_the_others_that_are_present() -> None:
    rewards_b = rewards_tensor([3.0, 1.0, None, 2.0])
    advantages_bt = rloo_advantages(rewards_b, torch.zeros(4, dtype=torch.long), torch.ones(4, 1))
    torch.testing.assert_close(advantages_bt[:, 0], torch.tensor([3.0 - 1.5, 1.0 - 2.5, 0.0, 2.0 - 2.0]))
