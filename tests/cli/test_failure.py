"""A failure is told in its own words, shortened when long, and mapped to an exit code."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nereus.cli.failure import describe, exit_code, show_failure
from nereus.errors import (
    Cancelled,
    CheckpointError,
    ConfigError,
    DataError,
    Infeasible,
    InvalidLayout,
    ModelError,
    StageFailed,
    TransitionAborted,
    WorkerLost,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 2),
        (ModelError("x"), 2),
        (CheckpointError("x"), 2),
        (InvalidLayout("x"), 2),
        (Infeasible("x"), 2),
        (StageFailed("x"), 1),
        (WorkerLost("x"), 1),
        (TransitionAborted("x"), 1),
        (ValueError("x"), 1),
        (Cancelled("x"), 130),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_our_errors_speak_for_themselves_and_others_carry_their_class() -> None:
    assert describe(WorkerLost("worker 3 died")) == "worker 3 died"
    assert describe(ValueError("bad")) == "ValueError: bad"
    assert describe(RuntimeError()) == "RuntimeError"


def test_a_long_failure_keeps_its_head_and_its_tail() -> None:
    text = describe(StageFailed("\n".join(f"line {i}" for i in range(200))))
    assert len(text.splitlines()) <= 14
    assert text.startswith("line 0\n")
    assert text.endswith("line 199")
    assert "left out" in text


def test_all_mistakes_of_a_config_are_told() -> None:
    text = "\n".join(f"mistake {i}" for i in range(30))
    assert describe(ConfigError(text)) == text


def test_brackets_and_long_lines_survive() -> None:
    out = io.StringIO()
    show_failure(ConfigError("gpus=[0, 1] " + "x" * 300), console=Console(file=out, width=80))
    assert out.getvalue() == "error: gpus=[0, 1] " + "x" * 300 + "\n"
