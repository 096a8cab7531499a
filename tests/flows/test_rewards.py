"""Campaigns whose rewards come from a sandbox or from a judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.record.metrics import read_records
from nereus.rewards.sandbox import Sandbox, SandboxError, check_sandbox
from tests.rewards.judge_server import says, serving

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]


@pytest.mark.slow
def test_programs_of_a_campaign_are_run_in_sandboxes(make_config: Make) -> None:
    try:
        check_sandbox(Sandbox())
    except SandboxError as error:
        pytest.skip(f"no sandbox on this machine: {error}")
    batch = {"prompts": 2, "samples": 2, "micro_batch_rows": 4}
    config = make_config(steps=1, batch=batch, reward={"kind": "code", "timeout_s": 20, "workers": 1})
    (record,) = read_records(campaign(config).metrics)
    # What a random model writes is no program: reward 0, and none is missing.
    assert (record.reward_min, record.reward_max, record.num_missing_rewards) == (0.0, 0.0, 0)
    assert record.stats["reward_queue_s/max"] >= record.stats["reward_queue_s/mean"] > 0


@pytest.mark.slow
def test_a_campaign_learns_from_a_judge_and_counts_what_it_did_not_say(make_config: Make) -> None:
    with serving(lambda n, body: says(f"Score: {n % 10}" if n else "I would rather not.")) as server:
        config = make_config(steps=1, reward={"kind": "judge", "url": server.url, "model_name": "grader"})
        (record,) = read_records(campaign(config).metrics)
    assert len(server.bodies) == 16
    assert record.num_missing_rewards == 1
    assert record.stats["missing/invalid"] == 1
    assert record.reward_min == 0.0
    assert record.reward_max == pytest.approx(0.9, abs=1e-7)  # rewards are float32
