"""A policy's loss over a batch, whatever its surrogate: weights, aggregation, statistics.

Letters: b rows (responses), t response positions.

    logprobs, old logprobs, advantages ──▶ surrogate ──▶ losses [b, t] ──▶ x weights ──▶ aggregate ──▶ scalar
                                           clip | gspo | cispo               correction
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nereus.algorithms.aggregation import Aggregation, GlobalCounts, aggregate, inside, token_mean

MAX_LOG_RATIO = (
    20.0  # exp(20) is 5e8: beyond it a stale sample would only overflow (verl; OpenRLHF and TRL don't)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """What a surrogate says of every token; [b, t] each, meaningless outside the mask.

    `losses_bt` carries the gradient. `clipped_bt` and `dual_clipped_bt` are true where the clip and the dual
    clip were active.
    """

    losses_bt: Tensor
    clipped_bt: Tensor
    dual_clipped_bt: Tensor


class Surrogate(Protocol):
    """A differentiable loss of every token, whose gradient is the policy gradient's estimate."""

    def __call__(
        self, logprobs_bt: Tensor, old_logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor
    ) -> TokenLosses:
        """`old_logprobs_bt` are those of the policy before this update. Inputs are zero outside the mask."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """This share's part of three token averages over the batch: detached scalars that add up like the loss.

    `clip_fraction` of tokens where the clip was active, `dual_clip_fraction` where the dual clip was,
    `approx_kl` the mean of old_logprob - logprob (k1 of the update itself).
    """

    clip_fraction: Tensor
    dual_clip_fraction: Tensor
    approx_kl: Tensor

    def __add__(self, other: PolicyStats) -> PolicyStats:
        return PolicyStats(
            clip_fraction=self.clip_fraction + other.clip_fraction,
            dual_clip_fraction=self.dual_clip_fraction + other.dual_clip_fraction,
            approx_kl=self.approx_kl + other.approx_kl,
        )

    def by_name(self) -> dict[str, Tensor]:
        """The scalars under the names of the metrics."""
        return {
            "clip_fraction": self.clip_fraction,
            "dual_clip_fraction": self.dual_clip_fraction,
            "approx_kl": self.approx_kl,
        }


def log_ratio(logprobs_bt: Tensor, old_logprobs_bt: Tensor) -> Tensor:
    """log(pi / pi_old) of every token, clamped to +-20; [b, t]."""
    return (logprobs_bt - old_logprobs_bt).clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)


def policy_loss(
    surrogate: Surrogate,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    *,
    counts: GlobalCounts,
    aggregation: Aggregation,
    weights_bt: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """This share's part of the surrogate's loss, a scalar, and of its statistics.

    `weights_bt` [b, t] scale the tokens' losses and are constants. They do not enter the counts: a token of
    weight zero still divides, so the loss of the others does not depend on how many were dropped.
    """
    logprobs_bt, old_logprobs_bt, advantages_bt = (
        inside(x_bt, mask_bt) for x_bt in (logprobs_bt, old_logprobs_bt, advantages_bt)
    )
    token = surrogate(logprobs_bt, old_logprobs_bt, advantages_bt, mask_bt)
    losses_bt = token.losses_bt
    if weights_bt is not None:
        losses_bt = losses_bt * inside(weights_bt.detach(), mask_bt)
    stats = PolicyStats(
        clip_fraction=token_mean(token.clipped_bt.float(), mask_bt, counts),
        dual_clip_fraction=token_mean(token.dual_clipped_bt.float(), mask_bt, counts),
        approx_kl=token_mean(-log_ratio(logprobs_bt, old_logprobs_bt), mask_bt, counts),
    )
    return aggregate(losses_bt, mask_bt, counts=counts, aggregation=aggregation), stats
