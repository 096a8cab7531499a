"""Advantages of REINFORCE++: the return, whitened over the whole batch; and its form with a group baseline.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import whiten
from nereus.algorithms.groups import group_statistics
from nereus.kernels.scan import discounted_returns


@torch.no_grad()
def reinforce_pp_advantages(rewards_bt: Tensor, mask_bt: Tensor, *, gamma: float) -> Tensor:
    """Returns G_t = r_t + gamma G_{t+1} over set positions, whitened over the batch; [b, t], zero elsewhere.

    Hu 2025, eq. 3, with the KL penalty of `rewards_bt` in the return. As in verl, t+1 is the next *set*
    position: tool output inside a response neither discounts nor ends a return.
    """
    set_bt = mask_bt.bool()
    return whiten(discounted_returns(rewards_bt, set_bt, gamma=gamma), set_bt)


@torch.no_grad()
def reinforce_pp_baseline_advantages(rewards_b: Tensor, group_b: Tensor, mask_bt: Tensor) -> Tensor:
    """R minus the mean of its group on every set position, whitened over the batch; [b, t], zero elsewhere.

    Against GRPO the deviation is the batch's and not the group's, so a group of nearly equal rewards is not
    blown up. `rewards_b` NaN where missing: such rows must have no set position. A group of one is 0 before
    whitening; verl keeps its raw reward.
    """
    group = group_statistics(rewards_b, group_b)
    centred_b = torch.where(group.present_b, group.rewards_b - group.mean_b, 0.0).float()
    return whiten(centred_b[:, None].expand(mask_bt.shape), mask_bt)
