"""Clipped losses of PPO: the policy's surrogate with dual clip, and the value loss.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.algorithms.aggregation import Aggregation, GlobalCounts, aggregate, inside, token_mean
from nereus.algorithms.surrogate import TokenLosses, log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate:
    """The surrogate of PPO: each token's ratio rho = pi / pi_old, clipped to [1 - clip_low, 1 + clip_high].

    A token's loss is max(-A rho, -A clip(rho)) (Schulman et al. 2017, eq. 7). DAPO's clip-higher is a
    `clip_high` above `clip_low` (Yu et al. 2025, eq. 10). Where A < 0 and `dual_clip` is a number c > 1, the
    loss is at most -A c (Ye et al. 2020, eq. 5; verl's default c is 3).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        assert self.dual_clip is None or self.dual_clip > 1.0, f"dual_clip {self.dual_clip} must exceed 1"

    def __call__(
        self, logprobs_bt: Tensor, old_logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor
    ) -> TokenLosses:
        """See `Surrogate`."""
        ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp()
        plain_bt = -advantages_bt * ratio_bt
        clipped_bt = -advantages_bt * ratio_bt.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        losses_bt = torch.maximum(plain_bt, clipped_bt)
        dual_bt = torch.zeros_like(losses_bt, dtype=torch.bool)
        if self.dual_clip is not None:
            ceiling_bt = -advantages_bt * self.dual_clip
            dual_bt = (advantages_bt < 0) & (losses_bt > ceiling_bt)
            losses_bt = torch.where(advantages_bt < 0, torch.minimum(losses_bt, ceiling_bt), losses_bt)
        return TokenLosses(losses_bt=losses_bt, clipped_bt=clipped_bt > plain_bt, dual_clipped_bt=dual_bt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStats:
    """This share's part of two token averages over the batch: detached scalars that add up like the loss.

    `clip_fraction` of tokens where the clip was active, `value_mean` the mean prediction.
    """

    clip_fraction: Tensor
    value_mean: Tensor

    def __add__(self, other: ValueStats) -> ValueStats:
        return ValueStats(
            clip_fraction=self.clip_fraction + other.clip_fraction,
            value_mean=self.value_mean + other.value_mean,
        )

    def by_name(self) -> dict[str, Tensor]:
        """The scalars under the names of the metrics."""
        return {"clip_fraction": self.clip_fraction, "value_mean": self.value_mean}


def value_loss(
    values_bt: Tensor,
    old_values_bt: Tensor,
    returns_bt: Tensor,
    mask_bt: Tensor,
    *,
    clip: float | None,
    counts: GlobalCounts,
    aggregation: Aggregation,
) -> tuple[Tensor, ValueStats]:
    """This share's part of the clipped squared error of the critic, and of its statistics.

    Each token's loss is 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); without `clip` only
    the first. `old_values_bt` are the predictions from which the returns were estimated.
    """
    values_bt, old_values_bt, returns_bt = (
        inside(x_bt, mask_bt) for x_bt in (values_bt, old_values_bt, returns_bt)
    )
    plain_bt = (values_bt - returns_bt).square()
    losses_bt, active_bt = plain_bt, torch.zeros_like(plain_bt)
    if clip is not None:
        near_bt = torch.minimum(torch.maximum(values_bt, old_values_bt - clip), old_values_bt + clip)
        clipped_bt = (near_bt - returns_bt).square()
        losses_bt, active_bt = torch.maximum(plain_bt, clipped_bt), (clipped_bt > plain_bt).float()
    stats = ValueStats(
        clip_fraction=token_mean(active_bt, mask_bt, counts),
        value_mean=token_mean(values_bt, mask_bt, counts),
    )
    return 0.5 * aggregate(losses_bt, mask_bt, counts=counts, aggregation=aggregation), stats
