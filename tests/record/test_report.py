"""report.html stands alone, tells the run, and survives odd records."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nereus.config import CampaignConfig
from nereus.record.decisions import append_decision
from nereus.record.emergencies import EmergencyRecord, Way, append_emergency
from nereus.record.metrics import METRICS_FILE, MetricsLog
from nereus.record.processes import ProcessesRecord, append_processes
from nereus.record.report import plan_segments, render_report, versions, write_report
from nereus.record.step import StepRecord, to_json
from nereus.record.transitions import OperationRecord, TransitionRecord, append_transition
from tests.record.records import make_record

VOID = {"meta", "br"}


@pytest.fixture
def config() -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "name": "trial-1",
            "steps": 12,
            "models": {"actor": "models/<tiny> & co"},
            "prompts": {"source": {"kind": "file", "path": "$prompts.jsonl"}},
            "reward": {"kind": "python", "function": "reward.py:score"},
        }
    )


class Nesting(HTMLParser):
    """Checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> None:
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []


def run(num_steps: int) -> list[StepRecord]:
    return [make_record(step) for step in range(num_steps)]


def test_the_page_asks_nothing_of_the_network(config: CampaignConfig, tmp_path: Path) -> None:
    page = render_report(run(12), config, tmp_path)
    check(page)
    assert not re.search(r"https?://|src=|href=|@import|url\(|<script", page)
    assert "prefers-color-scheme: dark" in page


def test_the_page_tells_the_run(config: CampaignConfig, tmp_path: Path) -> None:
    page = render_report(run(12), config, tmp_path)
    for text in ("trial-1", "12 of 12 steps", "0.5 → 11.5", "Response length", "Stage times", "learn actor"):
        assert text in page
    assert "tp2 pp1 dp1 on 0,1" in page
    assert "worker 1" in page
    assert "kl/actor" in page


def test_text_of_the_user_is_escaped(config: CampaignConfig, tmp_path: Path) -> None:
    page = render_report(run(1), config, tmp_path)
    assert "&lt;tiny&gt; &amp; co" in page
    assert "<tiny>" not in page
    assert "$prompts.jsonl" in page


def test_missing_rewards_get_a_chart_only_when_there_are_any(config: CampaignConfig, tmp_path: Path) -> None:
    assert "<h3>Missing rewards" not in render_report(run(3), config, tmp_path)
    records = [
        *run(3),
        make_record(3, reward_mean=None, reward_min=None, reward_max=None, num_missing_rewards=8),
    ]
    page = render_report(records, config, tmp_path)
    check(page)
    assert "<h3>Missing rewards" in page
    assert "0.5 → –" in page


@pytest.mark.parametrize(
    "records",
    [
        [],
        [make_record(5)],
        [make_record(0, stats={"loss/actor": math.nan}), make_record(1, stats={})],
        [make_record(0, memory_bytes={}, stage_s={}), make_record(1)],
    ],
    ids=["none", "one", "nan", "changing"],
)
def test_odd_records_give_a_page(config: CampaignConfig, tmp_path: Path, records: list[StepRecord]) -> None:
    check(render_report(records, config, tmp_path))


def test_plan_segments_join_equal_steps() -> None:
    records = [make_record(step, plan={"actor.training": "tp2" if step < 3 else "tp4"}) for step in range(5)]
    (segments,) = plan_segments(records).values()
    assert [(segment.first, segment.last, segment.text) for segment in segments] == [
        (0, 2, "tp2"),
        (3, 4, "tp4"),
    ]


def test_a_report_is_written_from_the_metrics(config: CampaignConfig, tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text("".join(to_json(record) + "\n" for record in run(4)))
    path = write_report(tmp_path, config)
    assert path == tmp_path / "report.html"
    assert "4 of 12 steps" in path.read_text()
    assert not list(tmp_path.glob("*.draft"))


def test_a_log_gives_what_a_report_reads(config: CampaignConfig, tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append(make_record(0))
    assert "1 of 12 steps" in write_report(tmp_path, config).read_text()


def test_versions_name_what_is_installed() -> None:
    names = [name for name, _ in versions()]
    assert {"python", "platform", "torch", "ray", "prefect"} <= set(names)


def test_decisions_transitions_and_emergencies_are_told(config: CampaignConfig, tmp_path: Path) -> None:
    change = {
        "step": 3,
        "trigger": {"cause": "length", "text": "length (mean) went from 8 to 12"},
        "old_step_s": 2.0,
        "new_step_s": 1.5,
        "new": "actor.training tp1 pp1 dp4",
    }
    refused = {"admit": False, "why": "it does not pay", "numbers": {"transition_s": 9.0}, "change": change}
    append_decision(tmp_path, refused)
    operation = OperationRecord(
        id="a",
        kind="split",
        model_stage="actor.training",
        text="Split actor.training#0",
        after=[],
        gpus=[0, 1],
        bytes=10,
        planned_bytes=10,
        seconds=0.1,
        carrier=None,
    )
    append_transition(
        tmp_path,
        TransitionRecord(
            step=5,
            epoch=2,
            outcome="commit",
            reason="",
            seconds=0.5,
            bytes=10,
            lower_bound=10,
            before={"actor.training": "tp2 pp1 dp1 on 0,1"},
            after={"actor.training": "tp1 pp1 dp2 on 0,1"},
            operations=[operation],
            picture="",
        ),
    )
    append_emergency(
        tmp_path,
        EmergencyRecord(
            step=7,
            gone=[3],
            way=Way.PEER_COPY,
            attempts=1,
            seconds=1.25,
            steps_redone=2,
            reason="worker 3 died <now>",
        ),
    )
    page = render_report(run(8), config, tmp_path)
    check(page)
    for text in (
        "it does not pay",
        "1 split",
        "Split actor.training#0",
        "peer copy",
        "worker 3 died &lt;now&gt;",
        "2 steps redone",
    ):
        assert text in page


def test_changes_of_the_number_of_processes_are_told(config: CampaignConfig, tmp_path: Path) -> None:
    records = [make_record(0)]
    assert "Reward and tool processes" not in render_report(records, config, tmp_path)
    change = ProcessesRecord(
        step=3,
        what="reward",
        before=1,
        number=6,
        num_calls=64.0,
        call_s=0.5,
        longest_s=1.0,
        cpu_share=0.25,
        window_s=4.0,
        limit_s=4.0,
        cores=5,
        why="too few <of them>",
    )
    append_processes(tmp_path, change)
    page = render_report(records, config, tmp_path)
    check(page)
    for text in ("Reward and tool processes (1)", "1 → 6", "25%", "too few &lt;of them&gt;"):
        assert text in page
