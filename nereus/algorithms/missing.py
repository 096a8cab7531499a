"""Rewards that could not be computed: NaN in a tensor of rewards, and rows that then count for nothing.

Letters: b rows (responses), t response positions.

A reward is missing when its function raised, ran out of time or declined. The value that stands for it is
NaN: unlike 0 it cannot be mistaken for a score, and unlike a second tensor it cannot be left behind.
`without_missing` clears the mask of such rows before anything is counted, so they add nothing to a loss nor
to the counts that divide it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rewards_tensor(rewards: Sequence[float | None]) -> Tensor:
    """Rewards as float32 [b]; `None` becomes NaN."""
    return torch.tensor([float("nan") if reward is None else float(reward) for reward in rewards])


def is_missing(rewards: Tensor) -> Tensor:
    """Rows without a reward: bool [b] from rewards [b], or [b, t] where any position is NaN."""
    missing = rewards.isnan()
    return missing.any(dim=-1) if missing.dim() == 2 else missing


def without_missing(mask_bt: Tensor, rewards: Tensor) -> Tensor:
    """The mask with the rows of missing rewards cleared; same dtype."""
    return mask_bt.masked_fill(is_missing(rewards)[:, None], 0)
