"""The device that a campaign runs on."""

from __future__ import annotations

import torch

from nereus.config import CampaignConfig
from nereus.errors import ConfigError, explain
from nereus.planner.profile import builtin_gpus


def device(config: CampaignConfig) -> str:
    """`cpu` or `cuda`, `auto` resolved by what this machine has."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def kind_of_device(kind: str) -> str:
    """The planner's name of the GPUs here: `CPU` on a CPU. Raises ConfigError for one that it does not
    know.
    """
    if kind == "cpu":
        return "CPU"
    name = torch.cuda.get_device_name()
    known = next((one for one in builtin_gpus() if one.split("-")[0] in name), None)
    if known is None:
        raise ConfigError(
            explain(
                "cannot plan for this GPU",
                values=name,
                rule=f"known kinds are {', '.join(builtin_gpus())}",
                remedy="name the closest one: cluster.gpu_kind in a campaign, --gpu-kind for a calibration",
            )
        )
    return known
