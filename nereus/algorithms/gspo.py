"""The surrogate of GSPO: one ratio a response, the geometric mean of its tokens' ratios.

Letters: b rows (responses), t response positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.algorithms.surrogate import TokenLosses

MAX_LOG_SEQUENCE_RATIO = 10.0  # verl's; a mean over tokens never comes near it in sane training


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSurrogate:
    """PPO's clip on s = exp(mean over the response's tokens of log(pi / pi_old)) (Zheng et al. 2025, eq. 7).

    Every token carries its response's s in value, and as gradient s times that of its own log-probability:
    the token form s_t = sg(s) pi / sg(pi) (eq. 13), which with one advantage a response has the gradient of
    the sequence form. To be aggregated by `seq-mean-token-mean`; with `seq-mean-token-sum` it is LUSPO.
    Needs whole responses in one micro-batch.
    """

    clip_low: float
    clip_high: float

    def __call__(
        self, logprobs_bt: Tensor, old_logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor
    ) -> TokenLosses:
        """See `Surrogate`."""
        lengths_b = mask_bt.bool().sum(dim=-1).clamp(min=1)
        sequence_b = (logprobs_bt - old_logprobs_bt).sum(dim=-1) / lengths_b
        own_bt = logprobs_bt - logprobs_bt.detach()  # zero in value
        ratio_bt = (own_bt + sequence_b.detach()[:, None]).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        plain_bt = -advantages_bt * ratio_bt
        clipped_bt = -advantages_bt * ratio_bt.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return TokenLosses(
            losses_bt=torch.maximum(plain_bt, clipped_bt),
            clipped_bt=clipped_bt > plain_bt,
            dual_clipped_bt=torch.zeros_like(plain_bt, dtype=torch.bool),
        )
