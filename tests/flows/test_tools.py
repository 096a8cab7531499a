"""Campaigns whose policy uses tools: in turn, ahead of training, in evaluations. Real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.record.evaluations import read_evaluations
from nereus.record.metrics import read_records
from nereus.record.processes import read_processes

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]

TOOL = """
import time

def tool(turn, turns, state, ground_truth):
    time.sleep(0.05)
    if turn.endswith("p"):
        raise ValueError("p")
    assert state == (None if len(turns) == 1 else {"turn": len(turns) - 1}) or "p" in "".join(turns)
    return {"observation": "abc", "state": {"turn": len(turns)}}

def score(response, turns):
    assert turns and len("".join(turns)) <= len(response)
    return len(turns) / 3 + len(response) / 100
"""


def parts(folder: Path, **more: Any) -> dict[str, Any]:
    path = folder / "tool.py"
    path.write_text(TOOL)
    return {
        "reward": {"kind": "python", "function": f"{path}:score"},
        "tools": {"function": f"{path}:tool", "max_turns": 3},
        # letters of the count task that end a turn; 19 is p, whose tool fails
        "sampling": {"max_new_tokens": 24, "stop_token_ids": [6, 9, 12, 15, 19]},
    } | more


def test_a_campaign_learns_from_rows_of_several_turns(make_config: Make, tmp_path: Path) -> None:
    records = read_records(campaign(make_config(**parts(tmp_path, steps=2))).metrics)
    assert len(records) == 2
    for record in records:
        assert record.num_missing_rewards == 0
        assert 1 < record.stats["turns/mean"] <= record.stats["turns/max"] <= 3
        assert record.stats["observed_tokens/mean"] > 0
        lengths = record.stats["policy_tokens/mean"] + record.stats["observed_tokens/mean"]
        assert record.length_mean == pytest.approx(lengths, rel=1e-5)
        # the engine that trains finds the log-probabilities that were drawn with: the same contexts
        assert abs(record.stats["approx_kl/actor"]) < 1e-4
    assert sum(record.stats.get("tools_failed/exception", 0) for record in records) > 0


@pytest.mark.slow
def test_a_policy_one_step_ahead_has_tools_too_between_segments_and_in_evaluations(
    make_config: Make, tmp_path: Path
) -> None:
    source = {
        "kind": "python",
        "function": make_config().prompts.source.function,
        "arguments": {"num_prompts": 3},
    }
    config = make_config(
        **parts(
            tmp_path,
            steps=4,
            algorithm={"kind": "grpo", "correction": {"weight": "token", "high": 2.0}},
            asynchrony={"staleness": 1, "segment_tokens": 5},
            plan={
                "actor_training": {"tp": 1, "gpus": [0]},
                "actor_generation": {"tp": 1, "dp": 1, "gpus": [1]},
            },
            evaluation={"source": source, "every_steps": 2, "samples": 2},
        )
    )
    result = campaign(config)
    records = read_records(result.metrics)
    assert len(records) == 4
    assert all(record.stats["turns/mean"] > 1 for record in records)
    assert all(record.stats["staleness/max"] <= 1 for record in records)
    assert max(record.stats["staleness/versions"] for record in records) >= 1
    assert len(read_evaluations(result.run_folder)) >= 2


@pytest.mark.slow
def test_slow_tools_get_more_processes_and_the_record_says_why(make_config: Make, tmp_path: Path) -> None:
    result = campaign(make_config(**parts(tmp_path, steps=3)))
    changes = [record for record in read_processes(result.run_folder) if record.what == "tool"]
    assert changes
    assert changes[0].before == 1 < changes[0].number
    assert "too few: a call waits for" in changes[0].why
    assert "Reward and tool processes" in result.report.read_text()
    last = read_records(result.metrics)[-1]
    assert last.stats["tool_processes"] == changes[-1].number
    fixed = parts(tmp_path, steps=2, name="fixed")
    fixed["tools"] |= {"workers": 1}
    assert not [
        record
        for record in read_processes(campaign(make_config(**fixed)).run_folder)
        if record.what == "tool"
    ]
