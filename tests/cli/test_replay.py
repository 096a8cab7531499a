"""`nereus replay`: table, CSV, picture, mistakes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from nereus.cli.replay import replay
from nereus.errors import ConfigError, DataError

JOB = ["--model", "llama-3.1-8b", "--cluster", "2x8xH100", "--batch", "256", "--algo", "grpo"]
SHORT = ["--steps", "8", "--mean-len", "500..2k"]


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(replay)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_policies_are_compared_in_a_table_a_csv_and_a_picture(tmp_path: Path) -> None:
    table, picture = tmp_path / "r.csv", tmp_path / "r.png"
    result = run(
        "steady",
        *JOB,
        *SHORT,
        "--policy",
        "payback,never",
        "--csv",
        str(table),
        "--plot",
        str(picture),
        "--decisions",
    )
    assert result.exit_code == 0, result.output
    for word in ("payback", "never", "mean step", "transitions", "8 steps", "Decisions of payback"):
        assert word in result.output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["policy"] for row in rows] == ["payback"] * 8 + ["never"] * 8
    assert all(float(row["step_s"]) > 0 and "actor.training" in row["plan"] for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_supply_and_lengths_come_from_files(tmp_path: Path) -> None:
    supply, lengths = tmp_path / "supply.csv", tmp_path / "lengths.csv"
    supply.write_text("at_s,nodes\n0,1\n250,2\n")
    lengths.write_text("step,mean,p95,max\n" + "".join(f"{at},500,900,1500\n" for at in range(5)))
    table = tmp_path / "r.csv"
    result = run(str(supply), *JOB, "--mean-len", str(lengths), "--policy", "any_gain", "--csv", str(table))
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [int(row["num_gpus"]) for row in rows] == [8, 8, 8, 16, 16]


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("steady", "--policy", "best"), ConfigError, "policies are"),
        (("absent.csv",), DataError, "cannot read the trace absent.csv"),
        (("steady", "--mean-len", "x..2k"), ConfigError, "--mean-len"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], error: type[Exception], said: str) -> None:
    result = run(*words, *JOB, *SHORT) if "--mean-len" not in words else run(*words, *JOB)
    assert isinstance(result.exception, error)
    assert said in str(result.exception)
