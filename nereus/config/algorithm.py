"""The algorithm: how rewards become advantages and a loss."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from nereus.config.frozen import Frozen


class Aggregation(StrEnum):
    """How token losses become one number, always by global counts."""

    token_mean = "token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_mean = "seq-mean-token-mean"
    seq_mean_token_sum_norm = "seq-mean-token-sum-norm"


class KlEstimator(StrEnum):
    """Estimator of the KL divergence from per-token log-probabilities."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlConfig(Frozen):
    """A KL term to the reference policy."""

    where: Literal["reward", "loss"] = "loss"
    """Subtract it from the reward, token by token, or add it to the loss."""
    coefficient: float = Field(default=0.001, ge=0)
    """Its weight."""
    estimator: KlEstimator = KlEstimator.k3
    """The estimator; k1 in the loss has zero expected gradient and is refused."""

    @model_validator(mode="after")
    def _k1_not_in_loss(self) -> KlConfig:
        if self.where == "loss" and self.estimator == KlEstimator.k1:
            raise ValueError(
                "estimator k1 in the loss has zero expected gradient; use k2 or k3, or where: reward"
            )
        return self


class PolicyLoss(Frozen):
    """What every algorithm's policy loss has."""

    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound of the loss for negative advantages (verl's clip_ratio_c); null switches it off."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """KL term to the reference policy; null runs without a reference model."""
    aggregation: Aggregation = Aggregation.token_mean
    """How token losses become one number."""


class PpoConfig(PolicyLoss):
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""

    kind: Literal["ppo"] = "ppo"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    value_clip: float = Field(default=0.5, gt=0)
    """Clip of the critic's change in the value loss."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """The critic's learning rate."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic learns."""


class GrpoConfig(PolicyLoss):
    """Group-relative policy optimisation (DeepSeekMath 2024): the group's mean is the baseline."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class RemaxConfig(PolicyLoss):
    """ReMax (Li et al. 2024): the reward of the greedy answer is the baseline."""

    kind: Literal["remax"] = "remax"
