"""The command line loads only what the chosen command needs, and ends with the promised exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from nereus import __version__
from nereus.cli.app import build_app, main
from nereus.cli.commands import COMMANDS, Command

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "ray", "prefect", "transformers", "numpy", "pyarrow"}


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of `nereus` with these arguments."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def loaded_by(*arguments: str) -> set[str]:
    """The top-level modules that `nereus` with these arguments loads."""
    program = (
        "import sys, atexit; from nereus.cli.app import main\n"
        "atexit.register(lambda: print('LOADED', *{m.split('.')[0] for m in sys.modules}))\n"
        f"main({list(arguments)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split())


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", "--help"), ("plan", "--help"), ("config", "keys", "tp"), ("doctor",)],
    ids=" ".join,
)
def test_light_commands_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert not loaded_by(*arguments) & HEAVY


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert command.name in out
    assert "Examples" in out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_its_examples(
    capsys: pytest.CaptureFixture[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(capsys, command.name, "--help")
    assert code == 0
    assert all(example in out for example in command.examples)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, f"nereus {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("runn",), "Did you mean 'run'?"),
        (("run",), "Missing argument"),
        (("run", "x.yaml", "--nope"), "--nope"),
    ],
    ids=["command", "argument", "option"],
)
def test_wrong_usage_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert expected in err


def test_a_bad_file_ends_with_2_and_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("steps: 0\n")
    for command in ("run", "validate"):
        code, _, err = call(capsys, command, str(path))
        assert code == 2
        assert f"{path}:1: steps: 0; must be greater than or equal to 1" in err
        assert "Traceback" not in err


def test_only_the_chosen_command_is_real() -> None:
    app = build_app(chosen="doctor")
    assert isinstance(app, typer.Typer)
    names = {info.name: info.callback.__module__ for info in app.registered_commands if info.callback}
    assert names["doctor"] == "nereus.cli.doctor"
    assert names["run"] == "nereus.cli.app"
