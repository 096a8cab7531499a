"""The losses that a configuration asks for, as values for the workers."""

from __future__ import annotations

from nereus.algorithms.ppo import ClippedSurrogate
from nereus.config import CampaignConfig, PpoConfig
from nereus.emu.loss import PolicyLoss, ValueLoss


def policy_loss_of(config: CampaignConfig) -> PolicyLoss:
    """The actor's loss."""
    algorithm = config.algorithm
    in_loss = algorithm.kl is not None and algorithm.kl.where == "loss"
    return PolicyLoss(
        surrogate=ClippedSurrogate(
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip
        ),
        aggregation=algorithm.aggregation.value,
        temperature=config.sampling.temperature,
        entropy=algorithm.entropy,
        kl=algorithm.kl.coefficient if in_loss and algorithm.kl else 0.0,
        kl_kind=algorithm.kl.estimator.value if in_loss and algorithm.kl else "k3",
    )


def value_loss_of(algorithm: PpoConfig) -> ValueLoss:
    """The critic's loss."""
    return ValueLoss(clip=algorithm.value_clip, aggregation=algorithm.aggregation.value)
