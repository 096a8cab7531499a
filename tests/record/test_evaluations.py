"""evaluations.jsonl, and where evaluations are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nereus.config import CampaignConfig
from nereus.record.dashboard import RECORDS
from nereus.record.evaluations import (
    EVALUATIONS_FILE,
    EvaluationRecord,
    append_evaluation,
    read_evaluations,
    scalars,
)
from nereus.record.live_page import live_page
from nereus.record.report import render_report
from tests.record.records import make_record


def evaluation(step: int, **changes: Any) -> EvaluationRecord:
    values: dict[str, Any] = {
        "step": step,
        "version": step,
        "num_prompts": 7,
        "num_samples": 4,
        "reward_mean": 0.25,
        "num_missing_rewards": 1,
        "pass_at": {"1": 0.5, "4": 0.75},
        "length_mean": 10.0,
        "num_cut": 2,
        "seconds": 1.5,
    }
    return EvaluationRecord(**values | changes)


def campaign(folder: Path) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "name": "run",
            "output": str(folder),
            "models": {"actor": "a"},
            "prompts": {"source": {"kind": "python", "function": "p.py:f"}},
            "reward": {"kind": "python", "function": "r.py:f"},
        }
    )


def test_evaluations_come_back_in_order_and_a_run_that_went_back_replaces_its_own(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path) == []
    for step in (0, 10, 20, 30):
        append_evaluation(tmp_path, evaluation(step))
    append_evaluation(tmp_path, evaluation(20, reward_mean=None))
    assert read_evaluations(tmp_path) == [evaluation(0), evaluation(10), evaluation(20, reward_mean=None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [EVALUATIONS_FILE]


def test_values_have_tags_and_an_absent_one_is_left_out() -> None:
    assert dict(scalars(evaluation(3))) == {
        "evaluation/reward_mean": 0.25,
        "evaluation/pass_at_1": 0.5,
        "evaluation/pass_at_4": 0.75,
        "evaluation/length_mean": 10.0,
        "evaluation/cut": 2,
        "evaluation/missing": 1,
        "evaluation/seconds": 1.5,
    }
    assert "evaluation/reward_mean" not in dict(scalars(evaluation(3, reward_mean=None)))


def test_the_report_and_the_live_page_show_them_and_the_dashboard_serves_them(tmp_path: Path) -> None:
    config, records = campaign(tmp_path), [make_record(0), make_record(1)]
    config.run_folder.mkdir()
    assert "Evaluation" not in render_report(records, config, config.run_folder)
    assert "Held-out" not in live_page(config, records)
    append_evaluation(config.run_folder, evaluation(0, reward_mean=0.125))
    append_evaluation(config.run_folder, evaluation(2, num_cut=5))
    page = render_report(records, config, config.run_folder)
    assert "7 held-out prompts, 4 sampled answers each" in page
    assert all(f"<th>pass@{k}</th>" in page for k in (1, 4))
    assert "<td>0.125</td><td>0.5</td><td>0.75</td>" in page
    live = live_page(config, records)
    assert "**Held-out reward (mean): reward**" in live
    assert "pass@1, pass@4**" in live
    assert EVALUATIONS_FILE in RECORDS
