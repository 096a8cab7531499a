"""What DAPO adds to GRPO besides its clip and aggregation: the filter of groups, and the penalty of overlong
responses.

Letters: b rows (responses).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.groups import group_statistics


def has_spread(rewards_b: Tensor, group_b: Tensor) -> Tensor:
    """Rows of groups whose present rewards are not all equal; bool [b].

    The others have advantage zero and teach nothing (Yu et al. 2025, eq. 11). A missing reward (NaN) does not
    make a spread.
    """
    group = group_statistics(rewards_b, group_b)
    highest_b, lowest_b = (
        _per_group(torch.where(group.present_b, group.rewards_b, fill), group_b, how)
        for fill, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
    )
    # By comparison and not by the deviation, which rounding can make positive.
    return highest_b > lowest_b


def _per_group(x_b: Tensor, group_b: Tensor, how: str) -> Tensor:
    index_b = torch.unique(group_b, return_inverse=True)[1]
    num_groups = int(index_b.max()) + 1 if len(index_b) else 0
    out_g = torch.zeros(num_groups, dtype=x_b.dtype, device=x_b.device)
    return out_g.scatter_reduce_(0, index_b, x_b, how, include_self=False)[index_b]


def overlong_penalty(
    lengths_b: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """What a response's length adds to its reward; float32 [b], between -factor and 0.

    Zero up to max_tokens - buffer_tokens, then linear down to -factor at max_tokens (Yu et al. 2025, eq. 13:
    the soft overlong punishment).
    """
    assert 0 < buffer_tokens <= max_tokens, f"a buffer of {buffer_tokens} tokens in {max_tokens}"
    beyond_b = (lengths_b.float() - (max_tokens - buffer_tokens)) / buffer_tokens
    return -factor * beyond_b.clamp(min=0.0, max=1.0)
