"""The learning rate is a function of the step alone."""

from __future__ import annotations

import pytest

from nereus.config import CampaignConfig
from nereus.tasks.rates import learning_rate


def config(**optimizer: object) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused"},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": {"kind": "ppo", "critic_learning_rate": 4.0},
            "steps": 10,
            "optimizer": {"learning_rate": 1.0} | optimizer,
        }
    )


def test_warm_up_rises_linearly_to_the_peak() -> None:
    rates = [learning_rate(config(warmup_steps=4), "actor", step) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_falls_from_the_peak_towards_zero(schedule: str) -> None:
    rates = [learning_rate(config(schedule=schedule), "actor", step) for step in range(10)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.11


def test_the_critic_has_its_own_peak() -> None:
    assert learning_rate(config(), "critic", 3) == 4.0
