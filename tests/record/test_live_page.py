"""The live page is Markdown whose pictures need nothing around them, and it tells the run's other records."""

from __future__ import annotations

import base64
import re
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nereus.config import CampaignConfig
from nereus.record.adaptation_tables import adaptation_tables
from nereus.record.decisions import append_decision
from nereus.record.emergencies import EmergencyRecord, Way, append_emergency
from nereus.record.live_page import NUM_ROWS, live_page
from nereus.record.report_adaptation import adaptation_section
from tests.record.records import make_record


@pytest.fixture
def config(tmp_path: Path) -> CampaignConfig:
    (tmp_path / "live").mkdir()
    return CampaignConfig.model_validate(
        {
            "name": "live",
            "output": str(tmp_path),
            "steps": 12,
            "models": {"actor": "model"},
            "prompts": {"source": {"kind": "file", "path": "prompts.jsonl"}},
            "reward": {"kind": "python", "function": "reward.py:score"},
        }
    )


def test_a_run_without_steps_says_so(config: CampaignConfig) -> None:
    assert "no step of 12 yet" in live_page(config, ())


def test_every_picture_is_an_svg_that_stands_alone(config: CampaignConfig) -> None:
    page = live_page(config, [make_record(step) for step in range(3)])
    assert "**3 of 12 steps**" in page
    pictures = re.findall(r"!\[([^]]+)\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", page)
    assert len(pictures) == 5
    for _, data in pictures:
        root = ElementTree.fromstring(base64.b64decode(data))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{http://www.w3.org/2000/svg}style") is not None
    assert "<svg" not in page


def decide(config: CampaignConfig, *, step: int, why: str) -> None:
    """A decision against a move before `step`."""
    append_decision(
        config.run_folder,
        {
            "admit": False,
            "why": why,
            "numbers": {"transition_s": 3.0},
            "change": {
                "step": step,
                "old_step_s": None,
                "new_step_s": 0.5,
                "new": "tp1",
                "trigger": {"cause": "length", "text": "longer"},
            },
        },
    )


def test_decisions_and_emergencies_are_tables_whose_cells_break_no_column(config: CampaignConfig) -> None:
    decide(config, step=2, why="the move costs 3 s | and gains\n1 s")
    append_emergency(
        config.run_folder,
        EmergencyRecord(
            step=1, gone=(3,), way=Way.TRANSITION, attempts=1, seconds=0.7, steps_redone=0, reason="killed"
        ),
    )
    page = live_page(config, [make_record(0)])
    tables = [line for line in page.splitlines() if line.startswith("|")]
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in tables}
    assert bars == {9, 8}  # eight columns of decisions, seven of emergencies
    assert "stays" in page
    assert "the move costs 3 s \\| and gains 1 s" in page


def test_the_page_shows_the_newest_rows_and_the_report_all_of_the_same(config: CampaignConfig) -> None:
    for step in range(NUM_ROWS + 3):
        decide(config, step=step, why=f"reason {step}.")
    (table,) = adaptation_tables(config.run_folder)
    page, report = live_page(config, [make_record(0)]), "".join(adaptation_section(config.run_folder))
    assert [f"reason {step}." in page for step in (2, 3, NUM_ROWS + 2)] == [False, True, True]
    for row in table.rows:
        assert "".join(f"<td>{escape(cell)}</td>" for cell in row) in report
    assert f"| {' | '.join(table.rows[-1])} |" in page
