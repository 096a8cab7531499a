"""Group-relative advantages (GRPO): a response against the others to the same prompt.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import inside
from nereus.algorithms.groups import group_statistics


@torch.no_grad()
def grpo_advantages(
    rewards_b: Tensor, group_b: Tensor, mask_bt: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """(R - mean of the group) / (std of the group + eps) on every set position; [b, t], zero elsewhere.

    `rewards_b` float [b], NaN where missing; `group_b` integer [b], equal for responses to one prompt; the
    standard deviation has ddof 1 and eps is verl's 1e-6 (TRL 1e-4, OpenRLHF 1e-9). Without `normalize_std`
    this is Dr. GRPO, which is to be paired with `seq-mean-token-sum-norm`.

    A missing reward is left out of its group and its own row gets zeros. A group of one gets zeros, as in
    TRL: there is nothing to compare with. verl returns the raw reward there, which would teach every lone
    response by its absolute score whatever the reward's offset.
    """
    group = group_statistics(rewards_b, group_b)
    advantages_b = group.rewards_b - group.mean_b
    if normalize_std:
        advantages_b = advantages_b / (group.std_b + eps)
    advantages_b = torch.where(group.present_b & (group.size_b > 1), advantages_b, 0.0).float()
    return inside(advantages_b[:, None].expand(mask_bt.shape), mask_bt)
