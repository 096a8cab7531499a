"""Divergence from the reference policy: per-token estimators, as a penalty in the reward or a term of the
loss.

Letters: b rows (responses), t response positions. D = logprob - reference, on tokens sampled from the policy.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nereus.algorithms.aggregation import Aggregation, GlobalCounts, aggregate, inside
from nereus.algorithms.surrogate import log_ratio

KlKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
KL_KINDS: tuple[KlKind, ...] = get_args(KlKind)
KlLossKind = Literal[KlKind, "k3-unbiased"]
"""What a term of the loss may be: an estimator, or k3 times the ratio pi / pi_old."""


def kl_estimate(logprobs_bt: Tensor, reference_bt: Tensor, kind: KlKind) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats; [b, t].

    k1 = D, abs = |D|, k2 = D^2 / 2, k3 = exp(-D) - 1 + D (Schulman, "Approximating KL divergence", 2020). As
    in verl, k3 takes D clamped to +-20 and is itself clamped to +-10; OpenRLHF clamps every kind to +-10, TRL
    none.

    k1 and k3 are unbiased in value but not in gradient; `k1+` and `k3+` have their value and the gradient of
    k2, which is unbiased. As a term of the loss use k2 or k3+; plain k1 there has an expected gradient of
    zero.
    """
    difference_bt = logprobs_bt - reference_bt
    match kind:
        case "k1":
            return difference_bt
        case "abs":
            return difference_bt.abs()
        case "k2":
            return 0.5 * difference_bt.square()
        case "k3":
            minus_bt = (-difference_bt).clamp(min=-20.0, max=20.0)
            return (minus_bt.exp() - minus_bt - 1.0).clamp(min=-10.0, max=10.0)
        case "k1+":
            return _with_gradient_of_k2(difference_bt.detach(), difference_bt)
        case "k3+":
            return _with_gradient_of_k2(kl_estimate(logprobs_bt, reference_bt, "k3").detach(), difference_bt)
        case _:
            raise ValueError(f"KL estimator {kind!r} is not one of {', '.join(KL_KINDS)}")


def value_kind(kind: KlLossKind) -> KlKind:
    """The estimator that has the value of a term of the loss, on policy."""
    return "k3" if kind == "k3-unbiased" else kind


def _with_gradient_of_k2(value_bt: Tensor, difference_bt: Tensor) -> Tensor:
    k2_bt = 0.5 * difference_bt.square()
    return value_bt + (k2_bt - k2_bt.detach())


@torch.no_grad()
def kl_in_reward(
    scores_b: Tensor,
    logprobs_bt: Tensor,
    reference_bt: Tensor,
    mask_bt: Tensor,
    *,
    beta: float,
    kind: KlKind,
) -> Tensor:
    """Per-token rewards: -beta * KL on every set position, plus the score on the last one; [b, t], zero
    elsewhere.

    `logprobs_bt` are those of the policy that is about to be updated. A missing score (NaN) stays NaN on its
    row's last position, so that a sum over the row is missing too. A row without set positions gets zeros.
    """
    set_bt = mask_bt.bool()
    penalty_bt = kl_estimate(inside(logprobs_bt, set_bt), inside(reference_bt, set_bt), kind)
    rewards_bt = inside(-beta * penalty_bt, set_bt)
    return torch.where(last_set(set_bt), rewards_bt + scores_b[:, None].to(rewards_bt.dtype), rewards_bt)


def last_set(mask_bt: Tensor) -> Tensor:
    """True at the last set position of each row; bool [b, t]."""
    set_bt = mask_bt.bool()
    after_bt = set_bt.flip(-1).cumsum(-1).flip(-1)
    return set_bt & (after_bt == 1)


def kl_loss(
    logprobs_bt: Tensor,
    reference_bt: Tensor,
    mask_bt: Tensor,
    *,
    kind: KlLossKind,
    counts: GlobalCounts,
    aggregation: Aggregation,
    old_logprobs_bt: Tensor | None = None,
) -> Tensor:
    """This share's part of the aggregated KL, a scalar, to be multiplied by its coefficient and added to the
    loss.

    `k3-unbiased` is k3 times the ratio pi / pi_old, gradient through both, and needs `old_logprobs_bt`: on
    policy its gradient is D times that of the log-probability, which is the divergence's own, and off policy
    it corrects for the sampling (DeepSeek-V3.2, eq. 7; TRL's `use_bias_correction_kl`).
    """
    logprobs_bt, reference_bt = inside(logprobs_bt, mask_bt), inside(reference_bt, mask_bt)
    if kind == "k3-unbiased":
        assert old_logprobs_bt is not None, "k3-unbiased needs the old log-probabilities"
        ratio_bt = log_ratio(logprobs_bt, inside(old_logprobs_bt, mask_bt)).exp()
        estimate_bt = ratio_bt * kl_estimate(logprobs_bt, reference_bt, "k3")
    else:
        estimate_bt = kl_estimate(logprobs_bt, reference_bt, kind)
    return aggregate(estimate_bt, mask_bt, counts=counts, aggregation=aggregation)
