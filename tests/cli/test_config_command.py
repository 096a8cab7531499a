"""`nereus config` shows what a campaign amounts to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nereus.cli.app import main
from nereus.config import CampaignConfig
from nereus.config.load import load_campaign

CAMPAIGN = """\
name: a
models: {actor: model}
prompts: {source: {kind: file, path: p.jsonl}}
reward: {kind: python, function: "reward.py:score"}
"""


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_schema_is_that_of_the_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "config", "schema")) == CampaignConfig.model_json_schema()


def test_what_is_shown_can_be_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(CAMPAIGN)
    text = output(capsys, "config", "show", str(path), "steps=7", f"output={tmp_path}")
    assert yaml.safe_load(text)["steps"] == 7
    again = tmp_path / "b.yaml"
    again.write_text(text)
    assert load_campaign(again) == load_campaign(path, ["steps=7", f"output={tmp_path}"])


def test_keys_are_found_by_name_and_by_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = output(capsys, "config", "keys", "moment")
    assert "optimizer.beta1" in out
    assert "learning_rate" not in out
    out = output(capsys, "config", "keys", "models.actor")
    assert "required" in out


def test_a_key_that_several_kinds_share_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = output(capsys, "config", "keys", "clip_low")
    assert out.count("algorithm.clip_low (grpo, ppo, remax, ") == 1
    assert out.count("algorithm.clip_low (gspo)") == 1


def test_an_unknown_word_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "keys", "zzzz"])
    assert ended.value.code == 1
    assert "no key holds 'zzzz'" in capsys.readouterr().out
