"""The embedded Prefect server is the default, and whatever the user has chosen is respected."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.cli.embedded import prepare_environment
from nereus.config import environment


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment that the code sees: a home folder and nothing else."""
    seen = {"HOME": str(tmp_path)}
    monkeypatch.setattr(environment.os, "environ", seen)
    monkeypatch.setenv("HOME", str(tmp_path))  # for ~, which is expanded by the real environment
    return seen


def write_profile(home: Path, active: str) -> None:
    folder = home / ".prefect"
    folder.mkdir()
    text = (
        f'active = "{active}"\n[profiles.mine]\nPREFECT_API_URL = "http://server/api"\n[profiles.ephemeral]\n'
    )
    (folder / "profiles.toml").write_text(text)


def test_a_server_of_its_own_lives_in_the_run_folder(variables: dict[str, str], tmp_path: Path) -> None:
    where = prepare_environment(tmp_path / "runs" / "a")
    assert where == "the embedded Prefect server"
    assert variables["PREFECT_HOME"] == str(tmp_path / "runs" / "a" / "prefect")
    assert Path(variables["PREFECT_HOME"]).is_dir()
    assert variables["PREFECT_SERVER_EPHEMERAL_ENABLED"] == "true"
    assert variables["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert variables["DO_NOT_TRACK"] == "1"


def test_a_chosen_server_is_used(variables: dict[str, str], tmp_path: Path) -> None:
    variables["PREFECT_API_URL"] = "http://other/api"
    assert prepare_environment(tmp_path / "run") == "http://other/api"
    assert "PREFECT_HOME" not in variables
    assert "PREFECT_SERVER_EPHEMERAL_ENABLED" not in variables
    assert not (tmp_path / "run").exists()


def test_the_server_of_the_active_profile_is_used(variables: dict[str, str], tmp_path: Path) -> None:
    write_profile(tmp_path, "mine")
    assert prepare_environment(tmp_path / "run") == "http://server/api"
    assert "PREFECT_HOME" not in variables


def test_a_profile_without_a_server_leaves_the_embedded_one(
    variables: dict[str, str], tmp_path: Path
) -> None:
    write_profile(tmp_path, "ephemeral")
    assert prepare_environment(tmp_path / "run") == "the embedded Prefect server"


def test_variables_of_the_user_stay(variables: dict[str, str], tmp_path: Path) -> None:
    variables["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "INFO"
    variables["PREFECT_HOME"] = str(tmp_path / "mine")
    prepare_environment(tmp_path / "run")
    assert variables["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] == "INFO"
    assert variables["PREFECT_HOME"] == str(tmp_path / "mine")
