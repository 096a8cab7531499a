"""Evaluations of whole campaigns: recorded, shown, and without effect on training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.record.evaluations import read_evaluations
from nereus.record.metrics import read_records
from tests.flows.conftest import COUNT

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]
HELD_OUT = {
    "kind": "python",
    "function": f"{COUNT / 'prompts.py'}:prompts",
    "arguments": {"num_prompts": 3},
}


def learnt(folder: Path) -> list[dict[str, Any]]:
    """Of every step what does not depend on the clock or on the process."""
    told = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("stage_s", "step_s", "tokens_per_s", "memory_bytes", "overhead_s"):
            del record[name]
        record["stats"] = {name: value for name, value in record["stats"].items() if "_s/" not in name}
        told.append(record)
    return told


@pytest.mark.slow
def test_evaluations_are_recorded_and_training_does_not_notice(make_config: Make, tmp_path: Path) -> None:
    plain = campaign(make_config(name="plain"))
    config = make_config(
        name="measured",
        evaluation={
            "source": HELD_OUT,
            "every_steps": 2,
            "samples": 4,
            "pass_at": [1, 2, 4],
            "pass_reward": 0.2,
        },
    )
    measured = campaign(config)

    # Bit for bit: the same samples, rewards, losses and weights.
    assert learnt(measured.run_folder) == learnt(plain.run_folder)
    weights = [next(result.model.glob("*.safetensors")).read_bytes() for result in (plain, measured)]
    assert weights[0] == weights[1]

    evaluations = read_evaluations(measured.run_folder)
    assert [record.step for record in evaluations] == [0, 2, 3]
    assert [record.version for record in evaluations] == [0, 2, 3]
    for record in evaluations:
        assert (record.num_prompts, record.num_samples, record.num_missing_rewards) == (3, 4, 0)
        assert record.pass_at["1"] <= record.pass_at["2"] <= record.pass_at["4"]
        assert record.reward_mean is not None
        assert 0 < record.length_mean <= 12
    assert "3 held-out prompts, 4 sampled answers each" in measured.report.read_text()
    board = EventAccumulator(str(measured.run_folder / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("evaluation/pass_at_2")] == [0, 2, 3]
    assert not (plain.run_folder / "evaluations.jsonl").exists()
    assert "evaluate" not in read_records(measured.metrics)[0].stage_s


@pytest.mark.slow
def test_a_run_that_continues_does_not_evaluate_the_same_state_twice_and_greedy_answers_repeat(
    make_config: Make,
) -> None:
    evaluation = {"source": HELD_OUT, "every_steps": 1}
    whole = campaign(make_config(name="whole", evaluation=evaluation))
    half = make_config(name="half", evaluation=evaluation)
    first = campaign(half, max_steps=2)
    stored = read_evaluations(first.run_folder)
    assert [record.step for record in stored] == [0, 1, 2]
    campaign(half, resume=True)
    both = read_evaluations(first.run_folder)
    assert both[:3] == stored  # seconds and all
    told = [
        [(record.step, record.version, record.reward_mean, record.length_mean) for record in records]
        for records in (both, read_evaluations(whole.run_folder))
    ]
    assert told[0] == told[1]
