"""Weights for samples that another policy than the one being updated has drawn: importance weights, and
rejection.

Letters: b rows (responses), t response positions.

    behaviour ──(drew the tokens)      proximal ──(before this update)      current ──(has the gradient)
         └──────────── w, a constant ─────┘└──────── the surrogate's ratio ─────┘

`w = exp(proximal - behaviour)`; a decoupled loss multiplies every token's surrogate by it (Hilton et al.
2022; AReaL). Where the proximal policy is taken to be the behaviour policy, w is 1 and nothing is to be done:
the ratio then holds the whole difference, and a weight would count it twice.

Whatever is dropped gets weight zero and stays in the counts that divide the loss (AReaL's choice; verl takes
rejected tokens out of the mask): the others' loss does not depend on how many were dropped, and no count has
to be exchanged before the backward pass. KL and entropy terms are not weighted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nereus.algorithms.aggregation import inside
from nereus.algorithms.kl import kl_estimate
from nereus.algorithms.surrogate import MAX_LOG_RATIO, log_ratio

WeightLevel = Literal["none", "token", "sequence"]
Beyond = Literal["cap", "drop"]
Measure = Literal["k1", "k2", "k3"]
RejectLevel = Literal["token", "sequence-sum", "sequence-mean", "sequence-max"]
REJECT_LEVELS: tuple[RejectLevel, ...] = get_args(RejectLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Which tokens or rows are dropped: those whose divergence of proximal from behaviour is out of bounds.

    `k1` is bounded on both sides and its bounds are ratios: a value is dropped unless low <= exp(log w) <=
    high. So `sequence-mean` keeps rows by their geometric mean ratio. k2 and k3 are at least zero and have
    an upper bound in nats only. `sequence-max` takes k2 or k3.
    """

    measure: Measure = "k1"
    level: RejectLevel = "token"
    low: float | None = None
    high: float

    def keeps(self, log_weights_bt: Tensor, mask_bt: Tensor) -> Tensor:
        """Bool [b, t]: true where a token stays. `log_weights_bt` is zero outside the mask."""
        if self.measure == "k1":
            measure_bt = log_weights_bt
            low = -torch.inf if self.low is None else torch.tensor(self.low).log().item()
            high = torch.tensor(self.high).log().item()
        else:
            # The divergence KL(behaviour || proximal) on tokens that the behaviour policy drew.
            measure_bt = kl_estimate(torch.zeros_like(log_weights_bt), log_weights_bt, self.measure)
            low, high = -torch.inf, self.high
        if self.level == "token":
            value_bt = measure_bt
        else:
            lengths_b = mask_bt.bool().sum(dim=-1).clamp(min=1)
            measure_bt = inside(measure_bt, mask_bt)
            value_b = {
                "sequence-sum": measure_bt.sum(dim=-1),
                "sequence-mean": measure_bt.sum(dim=-1) / lengths_b,
                "sequence-max": measure_bt.max(dim=-1).values,
            }[self.level]
            value_bt = value_b[:, None].expand(log_weights_bt.shape)
        return (value_bt >= low) & (value_bt <= high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How samples of the behaviour policy are weighted in the update.

    | name | weight | low | high | beyond |
    |---|---|---|---|---|
    | decoupled PPO (AReaL) | token | | | |
    | token TIS (Yao et al. 2025) | token | | C | cap |
    | sequence TIS | sequence | | C | cap |
    | IcePop (Ling 2025) | token | lo | hi | drop |
    | sequence mask (TRL's default for vLLM) | sequence | | C | drop |

    `weight` none drops only what `rejection` or `negative_limit` drop. `negative_limit` is delta of
    DeepSeek-V3.2, eq. 9: tokens of negative advantage are dropped in rows whose mean of behaviour - current
    exceeds it.
    """

    weight: WeightLevel = "token"
    low: float | None = None
    high: float | None = None
    beyond: Beyond = "cap"
    rejection: Rejection | None = None
    negative_limit: float | None = None

    @torch.no_grad()
    def weights(
        self,
        logprobs_bt: Tensor,
        proximal_bt: Tensor,
        behaviour_bt: Tensor,
        advantages_bt: Tensor,
        mask_bt: Tensor,
    ) -> Tensor:
        """Constant weights of the tokens' losses; float32 [b, t], zero outside the mask and where dropped."""
        logprobs_bt, proximal_bt, behaviour_bt, advantages_bt = (
            inside(x_bt.detach(), mask_bt) for x_bt in (logprobs_bt, proximal_bt, behaviour_bt, advantages_bt)
        )
        log_weights_bt = log_ratio(proximal_bt, behaviour_bt)
        weights_bt = self._bounded(importance_weights(proximal_bt, behaviour_bt, mask_bt, self.weight))
        if self.rejection is not None:
            weights_bt = weights_bt * self.rejection.keeps(log_weights_bt, mask_bt)
        if self.negative_limit is not None:
            keep_bt = keeps_negative(logprobs_bt, behaviour_bt, advantages_bt, mask_bt, self.negative_limit)
            weights_bt = weights_bt * keep_bt
        return inside(weights_bt, mask_bt)

    def _bounded(self, weights_bt: Tensor) -> Tensor:
        low, high = self.low or 0.0, torch.inf if self.high is None else self.high
        if self.beyond == "cap":
            return weights_bt.clamp(min=low, max=high)
        return weights_bt * ((weights_bt >= low) & (weights_bt <= high))


def importance_weights(
    proximal_bt: Tensor, behaviour_bt: Tensor, mask_bt: Tensor, level: WeightLevel
) -> Tensor:
    """exp(proximal - behaviour) of each token, or of each row's sum on all its tokens; [b, t], zero outside.

    Exponents are clamped to +-20, as in verl.
    """
    log_bt = inside(log_ratio(proximal_bt, behaviour_bt), mask_bt)
    if level == "none":
        log_bt = torch.zeros_like(log_bt)
    elif level == "sequence":
        sums_b = log_bt.sum(dim=-1).clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)
        log_bt = sums_b[:, None].expand(log_bt.shape)
    return inside(log_bt.exp(), mask_bt)


def keeps_negative(
    logprobs_bt: Tensor, behaviour_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, limit: float
) -> Tensor:
    """Bool [b, t]: false at tokens of negative advantage in rows that have drifted by more than `limit`
    nats a token (DeepSeek-V3.2, eq. 9, and TRL's `get_off_policy_mask`).
    """
    lengths_b = mask_bt.bool().sum(dim=-1).clamp(min=1)
    drift_b = inside(behaviour_bt - logprobs_bt, mask_bt).sum(dim=-1) / lengths_b
    return (advantages_bt >= 0) | (drift_b <= limit)[:, None]
