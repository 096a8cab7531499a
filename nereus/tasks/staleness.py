"""How old the policy that drew a step's tokens is when they are learnt from. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.emu.batch import Rollouts


def token_versions(rollouts: Rollouts) -> Tensor:
    """The version of the policy that drew each token that one drew; int64 [num tokens], row after row."""
    mask_bt = rollouts.policy_mask()
    if rollouts.versions_bt is None:
        return torch.full((int(mask_bt.sum()),), rollouts.version)
    return rollouts.versions_bt[:, : mask_bt.shape[1]][mask_bt]


def staleness(rollouts: Rollouts, version: int) -> dict[str, float]:
    """Versions between the policy that drew a token and `version`, which learns from it: mean and maximum
    over tokens, and how many versions drew.
    """
    versions = token_versions(rollouts)
    behind = version - versions
    return {
        "staleness/mean": float(behind.float().mean()),
        "staleness/max": float(behind.max()),
        "staleness/versions": float(len(set(versions.tolist()))),
    }
