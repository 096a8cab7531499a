"""The weight of a KL term that follows the divergence: adaptive beta."""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import inside
from nereus.algorithms.kl import KlKind, kl_estimate

MOST_ERROR = 0.2  # of one update, relative to the target (Ziegler et al. 2019)


def adapted_beta(beta: float, kl: float, *, target: float, horizon_rows: int, num_rows: int) -> float:
    """The weight after a step of `num_rows` rows whose divergence was `kl`, in nats a token.

    beta (1 + clip(kl / target - 1, -0.2, 0.2) num_rows / horizon_rows) (Ziegler et al. 2019, section 2.2; as
    in verl): a divergence above the target makes the term heavier.
    """
    error = min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR)
    return beta * (1.0 + error * num_rows / horizon_rows)


@torch.no_grad()
def mean_kl(logprobs_bt: Tensor, reference_bt: Tensor, mask_bt: Tensor, kind: KlKind) -> float:
    """The divergence of a batch: over rows with a set position, the mean of each row's mean estimate.

    verl's statistic; TRL sums over tokens, so its targets are larger by a response's length. 0 where no
    position is set.
    """
    estimate_bt = kl_estimate(inside(logprobs_bt, mask_bt), inside(reference_bt, mask_bt), kind)
    lengths_b = mask_bt.bool().sum(dim=-1)
    means_b = inside(estimate_bt, mask_bt).sum(dim=-1) / lengths_b.clamp(min=1)
    return float(means_b.sum() / max(int((lengths_b > 0).sum()), 1))
