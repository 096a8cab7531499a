"""ReMax advantages: a response against the greedy response to the same prompt.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import inside
from nereus.algorithms.missing import is_missing, without_missing


@torch.no_grad()
def remax_advantages(rewards_bt: Tensor, baselines_b: Tensor, mask_bt: Tensor) -> Tensor:
    """Reward still to come minus the baseline: sum over k >= t of r_k, minus b; [b, t], zero where the mask
    is unset.

    `baselines_b` [b] is the reward of the greedy response to the row's prompt, repeated over its samples; a
    KL penalty inside `rewards_bt` has no part in it (Li et al. 2024, and verl's
    `compute_remax_outcome_advantage`; verl leaves the return at unset positions). A row whose reward or
    baseline is missing (NaN) gets zeros: clear its mask with `without_missing(without_missing(mask_bt,
    rewards_bt), baselines_b)` before counting.
    """
    kept_bt = without_missing(without_missing(mask_bt, inside(rewards_bt, mask_bt)), baselines_b)
    to_come_bt = inside(rewards_bt, kept_bt).flip(-1).cumsum(-1).flip(-1)
    baselines_b = torch.where(is_missing(baselines_b), 0.0, baselines_b)
    return inside(to_come_bt - baselines_b[:, None], kept_bt)
