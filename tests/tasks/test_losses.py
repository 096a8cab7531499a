"""From the configuration to the loss that travels to the workers."""

from __future__ import annotations

import pickle

import pytest

from nereus.algorithms.cispo import ClippedWeightSurrogate
from nereus.algorithms.correction import Correction, Rejection
from nereus.algorithms.gspo import SequenceSurrogate
from nereus.algorithms.ppo import ClippedSurrogate
from nereus.algorithms.surrogate import Surrogate
from nereus.config import CampaignConfig
from nereus.tasks.losses import policy_loss_of


def config(**algorithm: object) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused"},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": algorithm,
        }
    )


@pytest.mark.parametrize(
    ("kind", "surrogate"),
    [
        ("dapo", ClippedSurrogate(clip_low=0.2, clip_high=0.28, dual_clip=3.0)),
        ("gspo", SequenceSurrogate(clip_low=3e-4, clip_high=4e-4)),
        ("cispo", ClippedWeightSurrogate(clip_low=1.0, clip_high=0.2)),
        ("rloo", ClippedSurrogate(clip_low=0.2, clip_high=0.2, dual_clip=3.0)),
    ],
)
def test_each_kind_has_its_surrogate_and_the_loss_travels(kind: str, surrogate: Surrogate) -> None:
    loss = policy_loss_of(config(kind=kind))
    assert loss.surrogate == surrogate
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_kl_term_in_the_reward_is_none_in_the_loss_and_an_adapted_weight_replaces_the_configured() -> None:
    in_reward = config(kind="grpo", kl={"where": "reward", "coefficient": 0.1})
    assert policy_loss_of(in_reward, beta=0.3).kl == 0.0
    in_loss = config(kind="grpo", kl={"where": "loss", "coefficient": 0.1, "estimator": "k3-unbiased"})
    assert (policy_loss_of(in_loss).kl, policy_loss_of(in_loss).kl_kind) == (0.1, "k3-unbiased")
    assert policy_loss_of(in_loss, beta=0.3).kl == 0.3


def test_a_correction_is_passed_on_whole() -> None:
    correction = {"weight": "token", "low": 0.5, "high": 5.0, "beyond": "drop", "negative_limit": 0.5}
    loss = policy_loss_of(config(kind="grpo", correction=correction | {"rejection": {"low": 0.9}}))
    assert loss.correction == Correction(
        weight="token",
        low=0.5,
        high=5.0,
        beyond="drop",
        rejection=Rejection(measure="k1", level="sequence-mean", low=0.9, high=2.0),
        negative_limit=0.5,
    )
    assert policy_loss_of(config(kind="grpo")).correction is None
