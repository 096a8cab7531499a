"""The device that a campaign runs on."""

from __future__ import annotations

import torch

from nereus.config import CampaignConfig


def device(config: CampaignConfig) -> str:
    """`cpu` or `cuda`, `auto` resolved by what this machine has."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if torch.cuda.is_available() else "cpu"
