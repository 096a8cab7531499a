"""Leave-one-out advantages (RLOO): a response against the mean of the others to the same prompt.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import inside
from nereus.algorithms.groups import group_statistics


@torch.no_grad()
def rloo_advantages(rewards_b: Tensor, group_b: Tensor, mask_bt: Tensor) -> Tensor:
    """n / (n - 1) (R - mean of the group) on every set position; [b, t], zero elsewhere.

    Equal to R minus the mean of the other n - 1 rewards (Ahmadian et al. 2024). Missing rewards (NaN) are
    left out and their rows get zeros. A group of one gets zeros, as in verl's vectorised form; verl's loop
    form keeps the raw reward.
    """
    group = group_statistics(rewards_b, group_b)
    scale_b = group.size_b / (group.size_b - 1).clamp(min=1)
    advantages_b = scale_b * (group.rewards_b - group.mean_b)
    advantages_b = torch.where(group.present_b & (group.size_b > 1), advantages_b, 0.0).float()
    return inside(advantages_b[:, None].expand(mask_bt.shape), mask_bt)
