"""The learning rate of a step, as a pure function of the configuration, so that a resumed run goes on
alike.
"""

from __future__ import annotations

import math
from typing import Literal

from nereus.config import CampaignConfig


def learning_rate(config: CampaignConfig, model: Literal["actor", "critic"] | str, step: int) -> float:
    """Linear warm-up, then constant, cosine or linear down to zero at the last step."""
    optimizer, algorithm = config.optimizer, config.algorithm
    peak = optimizer.learning_rate
    if model == "critic" and algorithm.kind == "ppo":
        peak = algorithm.critic_learning_rate
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    done = (step - warmup) / max(1, config.steps - warmup)
    if optimizer.schedule == "linear":
        return peak * max(0.0, 1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
