"""The losses that a configuration asks for, as values for the workers."""

from __future__ import annotations

from nereus.algorithms.cispo import ClippedWeightSurrogate
from nereus.algorithms.correction import Correction, Rejection
from nereus.algorithms.gspo import SequenceSurrogate
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.algorithms.surrogate import Surrogate
from nereus.config import CampaignConfig, CispoConfig, CorrectionConfig, GspoConfig, PpoConfig
from nereus.emu.loss import PolicyLoss, ValueLoss


def policy_loss_of(config: CampaignConfig, *, beta: float | None = None) -> PolicyLoss:
    """The actor's loss; `beta` is the weight of the KL term where that adapts, else the configured one."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    in_loss = kl if kl is not None and kl.where == "loss" else None
    return PolicyLoss(
        surrogate=surrogate_of(config),
        aggregation=algorithm.aggregation.value,
        temperature=config.sampling.temperature,
        entropy=algorithm.entropy,
        kl=0.0 if in_loss is None else in_loss.coefficient if beta is None else beta,
        kl_kind="k3" if in_loss is None else in_loss.estimator.value,
        correction=None if algorithm.correction is None else correction_of(algorithm.correction),
    )


def surrogate_of(config: CampaignConfig) -> Surrogate:
    """The loss of every token."""
    algorithm = config.algorithm
    if isinstance(algorithm, GspoConfig):
        return SequenceSurrogate(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
    if isinstance(algorithm, CispoConfig):
        return ClippedWeightSurrogate(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
    return ClippedSurrogate(
        clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip
    )


def correction_of(config: CorrectionConfig) -> Correction:
    """The weights of samples that another policy has drawn."""
    rejection = config.rejection
    return Correction(
        weight=config.weight,
        low=config.low,
        high=config.high,
        beyond=config.beyond,
        rejection=None
        if rejection is None
        else Rejection(
            measure=rejection.measure, level=rejection.level, low=rejection.low, high=rejection.high
        ),
        negative_limit=config.negative_limit,
    )


def value_loss_of(algorithm: PpoConfig) -> ValueLoss:
    """The critic's loss."""
    return ValueLoss(clip=algorithm.value_clip, aggregation=algorithm.aggregation.value)
