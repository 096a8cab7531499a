"""The surrogate of CISPO: REINFORCE with a clipped ratio as a constant weight, so that no token loses its
gradient.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.algorithms.surrogate import TokenLosses, log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedWeightSurrogate:
    """A token's loss is -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (MiniMax 2025, eq. 4 and 5).

    This is verl's form. TRL's differs: there the upper clip is `clip_high` itself, not 1 + `clip_high`, and
    there is no lower one, so the same numbers mean another loss. The paper clips from above only: that is a
    `clip_low` of 1 or more.
    """

    clip_low: float
    clip_high: float

    def __call__(
        self, logprobs_bt: Tensor, old_logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor
    ) -> TokenLosses:
        """See `Surrogate`."""
        ratio_bt = log_ratio(logprobs_bt, old_logprobs_bt).detach().exp()
        clipped_bt = ratio_bt.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return TokenLosses(
            losses_bt=-clipped_bt * advantages_bt * logprobs_bt,
            clipped_bt=clipped_bt != ratio_bt,
            dual_clipped_bt=torch.zeros_like(ratio_bt, dtype=torch.bool),
        )
