"""Reward of the calculator task: whether the model's last turn is the sum."""

from __future__ import annotations

from collections.abc import Sequence


def reward(turns: Sequence[str], ground_truth: str) -> float:
    """1 where the last turn, which the model itself wrote, is the sum; else 0."""
    return float(turns[-1] == ground_truth)
