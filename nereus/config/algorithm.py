"""The algorithm: how rewards become advantages and a loss. docs/algorithms.md has the formulas."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from nereus.config.correction import CorrectionConfig
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
    k3_straight = "k3+"
    k3_unbiased = "k3-unbiased"


class AdaptiveKl(Frozen):
    """A coefficient that follows the measured divergence (Ziegler et al. 2019)."""

    target: float = Field(default=0.1, gt=0)
    """Divergence to hold, in nats a token."""
    horizon_rows: int = Field(default=10_000, ge=1)
    """Rows in which the coefficient changes by at most a fifth."""


class KlConfig(Frozen):
    """A KL term to the reference policy."""

    where: Literal["reward", "loss"] = "loss"
    """Subtract it from the reward, token by token, or add it to the loss."""
    coefficient: float = Field(default=0.001, ge=0)
    """Its weight; with adaptive, its first weight."""
    estimator: KlEstimator = KlEstimator.k3
    """The estimator. k1 in the loss has zero expected gradient and is refused; k3+ has k3's value and k2's
    gradient; k3-unbiased is k3 times the ratio to the policy before the update; both are for the loss."""
    adaptive: AdaptiveKl | None = None
    """Let the weight follow the divergence; null keeps it."""

    @model_validator(mode="after")
    def _estimator_fits(self) -> KlConfig:
        if self.where == "loss" and self.estimator == KlEstimator.k1:
            raise ValueError(
                "estimator k1 in the loss has zero expected gradient; use k2 or k3, or where: reward"
            )
        if self.where == "reward" and self.estimator in (KlEstimator.k3_straight, KlEstimator.k3_unbiased):
            raise ValueError(
                f"estimator {self.estimator.value} differs from k3 in its gradient only, and a reward has "
                "none; use k3, or where: loss"
            )
        return self

    @model_validator(mode="after")
    def _can_adapt(self) -> KlConfig:
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError(
                "adaptive multiplies the coefficient, and coefficient = 0 stays 0; give a positive one"
            )
        return self


class PolicyConfig(Frozen):
    """What every algorithm has."""

    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """KL term to the reference policy; null runs without a reference model."""
    aggregation: Aggregation = Aggregation.token_mean
    """How token losses become one number."""
    correction: CorrectionConfig | None = None
    """Score every response once more before the update and weigh it by how far the policy that drew it is
    from the trained one; null takes the engine's own log-probabilities for the trained policy's."""

    @property
    def compares_samples(self) -> bool:
        """Whether a response is compared with others to its prompt, so that one alone teaches nothing."""
        return False


class ClippedConfig(PolicyConfig):
    """Algorithms with the clipped surrogate of PPO."""

    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound of the loss for negative advantages (verl's clip_ratio_c); null switches it off."""


class PpoConfig(ClippedConfig):
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


class GrpoConfig(ClippedConfig):
    """Group-relative policy optimisation (DeepSeekMath 2024): the group's mean is the baseline."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation."""

    @property
    def compares_samples(self) -> bool:
        """Yes."""
        return True


class DrGrpoConfig(ClippedConfig):
    """Dr. GRPO (Liu et al. 2025): GRPO without the deviation and without the division by response length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = Aggregation.seq_mean_token_sum_norm
    """How token losses become one number; the default divides by max_new_tokens and not by the length."""

    @property
    def compares_samples(self) -> bool:
        """Yes."""
        return True


class DapoConfig(ClippedConfig):
    """DAPO (Yu et al. 2025): GRPO that clips higher, drops groups without spread, and shortens gently."""

    kind: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    max_batches: int = Field(default=10, ge=1)
    """Batches of prompts that a step may generate until batch.prompts groups have unequal rewards. After that
    it learns from those it has; the run ends when it has none."""
    overlong_share: float | None = Field(default=0.2, gt=0, le=1)
    """Last part of max_new_tokens in which the reward falls with the length; null does not punish length."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What a response of max_new_tokens loses."""

    @property
    def compares_samples(self) -> bool:
        """Yes."""
        return True


class GspoConfig(PolicyConfig):
    """GSPO (Zheng et al. 2025): GRPO's advantages, and one ratio a response."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0)
    """Lower clip of the response's ratio: 1 - clip_low. It is a mean, so the bounds are narrow."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Upper clip of the response's ratio: 1 + clip_high."""
    aggregation: Aggregation = Aggregation.seq_mean_token_mean
    """How token losses become one number."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""

    @property
    def compares_samples(self) -> bool:
        """Yes."""
        return True


class CispoConfig(PolicyConfig):
    """CISPO (MiniMax 2025), in verl's form: GRPO's advantages, and the clipped ratio as a constant weight."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0)
    """Lower clip of the weight: 1 - clip_low; from 1 on there is none, as in the paper."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the weight: 1 + clip_high. In TRL it is epsilon_high itself."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""

    @property
    def compares_samples(self) -> bool:
        """Yes."""
        return True


class RlooConfig(ClippedConfig):
    """RLOO (Ahmadian et al. 2024): the mean of the other samples is the baseline."""

    kind: Literal["rloo"] = "rloo"

    @property
    def compares_samples(self) -> bool:
        """Yes."""
        return True


class ReinforcePpConfig(ClippedConfig):
    """REINFORCE++ (Hu 2025): returns whitened over the whole batch."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token; with group_baseline it must be 1."""
    group_baseline: bool = False
    """Subtract the group's mean before whitening: REINFORCE++-baseline."""

    @property
    def compares_samples(self) -> bool:
        """With the group's mean as baseline."""
        return self.group_baseline

    @model_validator(mode="after")
    def _one_reward_a_row(self) -> ReinforcePpConfig:
        if self.group_baseline and self.gamma != 1:
            raise ValueError(
                f"gamma = {self.gamma} with group_baseline, which compares whole responses and discounts "
                "nothing; leave gamma at 1, or group_baseline out"
            )
        return self


class RemaxConfig(ClippedConfig):
    """ReMax (Li et al. 2024): the reward of the greedy answer is the baseline."""

    kind: Literal["remax"] = "remax"
