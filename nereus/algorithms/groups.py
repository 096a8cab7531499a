"""Statistics of groups of rows: the responses to one prompt.

Letters: b rows (responses), g groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.algorithms.missing import is_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """For every row, the statistics of its group over the rewards that are present; float64 [b].

    float64, because a group of equal rewards must have a spread of 0: in float32 the rounding of the mean
    alone, divided by an epsilon of 1e-6, becomes an advantage of about 0.01.
    """

    present_b: Tensor
    rewards_b: Tensor
    size_b: Tensor
    mean_b: Tensor
    std_b: Tensor


def group_statistics(rewards_b: Tensor, group_b: Tensor) -> GroupStatistics:
    """Size, mean and standard deviation (ddof 1; 0 for a group of one) of each row's group.

    Missing rewards (NaN) belong to no group: [1, missing, 0, missing] has mean 0.5. `group_b` holds any
    integers.
    """
    present_b = ~is_missing(rewards_b)
    rewards_b = torch.where(present_b, rewards_b.double(), 0.0)
    index_b = torch.unique(group_b, return_inverse=True)[1]

    def per_group(x_b: Tensor) -> Tensor:
        sums_g = torch.zeros(
            int(index_b.max()) + 1 if len(index_b) else 0, dtype=torch.float64, device=x_b.device
        )
        return sums_g.scatter_add_(0, index_b, x_b)[index_b]

    size_b = per_group(present_b.double())
    mean_b = per_group(rewards_b) / size_b.clamp(min=1)
    squares_b = per_group(torch.where(present_b, (rewards_b - mean_b).square(), 0.0))
    std_b = (squares_b / (size_b - 1).clamp(min=1)).sqrt()
    return GroupStatistics(
        present_b=present_b, rewards_b=rewards_b, size_b=size_b, mean_b=mean_b, std_b=std_b
    )
