"""What an asynchronous campaign may be configured to be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nereus.config import CampaignConfig

APART = {"actor_training": {"dp": 2}, "actor_generation": {"dp": 2, "gpus": [2, 3]}}


def make(**parts: Any) -> CampaignConfig:
    base: dict[str, Any] = {
        "models": {"actor": "model"},
        "prompts": {"source": {"kind": "file", "path": "prompts.jsonl"}},
        "reward": {"kind": "python", "function": "reward.py:reward"},
        "cluster": {"gpus": 4},
    }
    return CampaignConfig.model_validate(base | parts)


def test_a_campaign_is_synchronous_unless_it_says_otherwise() -> None:
    assert not make().runs_ahead
    assert not make(asynchrony={"staleness": 0}).runs_ahead
    assert make(asynchrony={}, plan=APART).runs_ahead


@pytest.mark.parametrize(
    "plan", [{}, {"actor_training": {"dp": 2}, "actor_generation": {"dp": 2, "gpus": [1, 2]}}]
)
def test_generation_that_runs_ahead_needs_gpus_of_its_own(plan: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"actor.generation and actor.training both use GPUs \[[01]\]"):
        make(asynchrony={"staleness": 1}, plan=plan)
    assert make(asynchrony={"staleness": 0}, plan=plan).asynchrony is not None


def test_the_critic_counts_and_so_do_changes() -> None:
    on_generation = {**APART, "critic_training": {"gpus": [3]}}
    with pytest.raises(ValidationError, match=r"critic.training both use GPUs \[3\]"):
        make(asynchrony={}, plan=on_generation, algorithm={"kind": "ppo"})
    with pytest.raises(ValidationError, match=r"both use GPUs \[0\]"):
        make(asynchrony={}, plan=APART, changes=[{"before_step": 2, "plan": {}}])


def test_segments_need_weight_syncs_that_come_in_between() -> None:
    with pytest.raises(ValidationError, match="segment_tokens = 8 with staleness = 0"):
        make(asynchrony={"staleness": 0, "segment_tokens": 8})


def test_a_job_that_adapts_keeps_generation_apart_by_itself_if_it_has_two_gpus() -> None:
    both = make(asynchrony={}, adaptation={})  # the plan, in which they share GPUs, is not used
    assert both.runs_ahead
    assert both.staleness == 1
    assert make(asynchrony={"staleness": 0}, adaptation={}, cluster={"gpus": 1}).staleness == 0


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ({"gpus": 1}, r"cluster.gpus = 1"),
        ({"gpus": 4, "schedule": [{"before_step": 3, "max_gpus": 1}]}, r"before step 3 = 1"),
    ],
)
def test_one_gpu_is_too_few_to_run_ahead(cluster: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name}, but .* give at least 2, or set staleness: 0"):
        make(asynchrony={}, adaptation={}, cluster=cluster)
