"""`nereus watch` shows a run from its folder, and says which runs there are when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from nereus.cli.watch import run_folder, sparkline, view
from nereus.errors import DataError
from nereus.record.metrics import METRICS_FILE
from nereus.record.step import to_json
from tests.record.records import make_record


def write_run(folder: Path, steps: int) -> Path:
    folder.mkdir(parents=True)
    (folder / METRICS_FILE).write_text("".join(to_json(make_record(step)) + "\n" for step in range(steps)))
    return folder


def test_a_run_is_found_by_folder_and_by_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one", 2)
    assert run_folder(str(folder), Path("elsewhere")) == folder
    assert run_folder("one", tmp_path / "runs") == folder


def test_an_unknown_run_is_told_with_those_there_are(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 1)
    write_run(tmp_path / "two", 1)
    with pytest.raises(DataError, match="one, two"):
        run_folder("three", tmp_path)


def test_the_view_tells_steps_stages_and_plan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", 12)
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    console.print(view(folder))
    text = console.export_text()
    record = make_record(11)
    assert "one: 12 steps" in text
    for stage, plan in record.plan.items():
        assert stage in text
        assert plan in text
    for stage in record.stage_s:
        assert stage in text


def test_a_sparkline_rises_with_its_values_and_keeps_its_width() -> None:
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([5, 5]) == "▁▁"
    assert len(sparkline(list(range(1000)))) <= 48
