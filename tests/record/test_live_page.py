"""The live page is Markdown whose pictures need nothing around them, and it tells the run's other records."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nereus.config import CampaignConfig
from nereus.record.decisions import append_decision
from nereus.record.emergencies import EmergencyRecord, Way, append_emergency
from nereus.record.live_page import live_page
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


def test_decisions_and_emergencies_are_tables_whose_cells_break_no_column(config: CampaignConfig) -> None:
    append_decision(
        config.run_folder,
        {
            "admit": False,
            "why": "the move costs 3 s | and gains\n1 s",
            "numbers": {"transition_s": 3.0},
            "change": {
                "step": 2,
                "old_step_s": None,
                "new_step_s": 0.5,
                "new": "tp1",
                "trigger": {"cause": "length", "text": "longer"},
            },
        },
    )
    append_emergency(
        config.run_folder,
        EmergencyRecord(
            step=1, gone=(3,), way=Way.TRANSITION, attempts=1, seconds=0.7, steps_redone=0, reason="killed"
        ),
    )
    page = live_page(config, [make_record(0)])
    tables = [line for line in page.splitlines() if line.startswith("|")]
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in tables}
    assert bars == {7, 6}  # six columns of decisions, five of emergencies
    assert "stays" in page
    assert "the move costs 3 s \\| and gains 1 s" in page
