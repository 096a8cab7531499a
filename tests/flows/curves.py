"""Two forced changes of a PPO job on four GPUs, and the claim that a curve does not notice them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereus.record.metrics import read_records
from nereus.record.step import StepRecord

SPLIT: dict[str, Any] = {"actor_training": {"tp": 1, "dp": 2}, "critic_training": {"pp": 2}}
SPREAD: dict[str, Any] = {
    "actor_training": {"tp": 2, "dp": 2},
    "actor_generation": {"tp": 2},
    "critic_training": {"tp": 2, "gpus": [2, 3]},
}
FOUR_GPUS: dict[str, Any] = {
    "algorithm": {"kind": "ppo"},
    "cluster": {"gpus": 4, "device": "cpu", "timeout_s": 60},
    "checkpoint": {"every_steps": 0},
}


def check_curve(moved: Path, still: Path) -> None:
    """Another layout sums in another order; everything else is the same."""
    one, other = read_records(still), read_records(moved)
    assert [r.version for r in one] == [r.version for r in other]
    assert [(r.epoch, r.position) for r in one] == [(r.epoch, r.position) for r in other]
    assert [r.response_tokens for r in one] == [r.response_tokens for r in other]
    for name in ("loss/actor", "loss/critic", "gradient_norm/actor", "gradient_norm/critic"):
        assert [r.stats[name] for r in one] == pytest.approx([r.stats[name] for r in other], abs=1e-4)


def same_steps(ours: list[StepRecord], theirs: list[StepRecord], *, within: float = 0.0) -> None:
    """Two runs took the same samples, and their losses differ by no more than that: another layout sums in
    another order.
    """
    for name in ("step", "version", "position", "response_tokens"):
        assert [getattr(r, name) for r in ours] == [getattr(r, name) for r in theirs]
    assert [r.stats["loss/actor"] for r in ours] == pytest.approx(
        [r.stats["loss/actor"] for r in theirs], abs=within
    )
