"""A run is shown in place on a terminal, line by line elsewhere, and not at all when quiet."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from nereus.cli.progress import (
    LiveProgress,
    Pace,
    PlainProgress,
    QuietProgress,
    describe_step,
    duration,
    open_progress,
)
from tests.record.records import make_record


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120), out


def test_the_console_decides_the_form() -> None:
    for terminal, quiet, kind in (
        (True, False, LiveProgress),
        (False, False, PlainProgress),
        (True, True, QuietProgress),
    ):
        progress = open_progress(console(terminal=terminal)[0], name="a", num_steps=3, quiet=quiet)
        assert isinstance(progress, kind)


def test_plain_progress_writes_a_line_a_step() -> None:
    target, out = console(terminal=False)
    with PlainProgress(target, num_steps=3) as progress:
        progress.on_message("starting 4 workers")
        progress.on_stage(0, "generate", None)
        progress.on_step(make_record(0, step_s=2.0))
        progress.on_step(make_record(2, step_s=2.0))
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting 4 workers"
    assert lines[1].startswith("step 1/3   reward 0.5 [0, 1]   length 12.5 (p95 20, max 24)")
    assert lines[1].endswith("2.0 s   4.0 s left")
    assert lines[2].startswith("step 3/3")
    assert "left" not in lines[2]


def test_quiet_progress_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with QuietProgress() as progress:
        progress.on_message("hello")
        progress.on_step(make_record(0))
    assert capsys.readouterr().out == ""


def test_live_progress_shows_steps_stages_and_numbers() -> None:
    target, out = console(terminal=True)
    with LiveProgress(target, name="count", num_steps=4) as progress:
        progress.on_stage(0, "generate", None)
        progress.on_stage(0, "generate", 1.0)
        progress.on_step(make_record(0, step_s=2.0))
        progress.on_stage(1, "learn actor", None)
        progress._live.refresh()
        shown = out.getvalue()
    for text in ("count", "1/4 steps", "6.0 s left", "learn actor", "reward 0.5"):
        assert text in shown
    assert "generate" not in shown.splitlines()[-2]


def test_live_progress_takes_reports_from_many_threads() -> None:
    target, out = console(terminal=True)
    with LiveProgress(target, name="count", num_steps=4) as progress, ThreadPoolExecutor(8) as pool:
        stages = [f"stage {i}" for i in range(200)]
        list(pool.map(lambda stage: progress.on_stage(0, stage, None), stages))
        list(pool.map(lambda stage: progress.on_stage(0, stage, 0.1), stages[1:]))
        progress._live.refresh()
        shown = out.getvalue()
    frame = shown.splitlines()[-1]
    assert "stage 0 " in frame
    assert "stage 1 " not in frame


def test_missing_rewards_are_told() -> None:
    assert (
        "reward – (all missing), 64 missing"
        in describe_step(make_record(0, reward_mean=None, num_missing_rewards=64))[0]
    )
    assert "missing" not in "".join(describe_step(make_record(0)))


def test_pace_follows_the_recent_steps() -> None:
    pace = Pace(100)
    assert pace.left(0) == ""
    for step_s in [100.0] * 5 + [1.0] * 10:
        pace.add(step_s)
    assert pace.left(15) == "1 min 25 s left"
    assert pace.left(100) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1 min 01 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
