"""The Prefect UI renders a campaign's parameters as a form: enums, nested models, unions by kind."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")]

DEPLOY = """
from nereus.flows.campaign import campaign
print(campaign.to_deployment(name="form").apply())
"""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,4000",
    "--virtual-time-budget=20000",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A Prefect server with its UI on a free port; ended by its pid."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(f"http://127.0.0.1:{port}/api/health", limit_s=180)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, *, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def rendered_text(url: str, profile: Path) -> str:
    """The visible text of a page after its scripts ran."""
    done = subprocess.run(
        ["chromium", *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", done.stdout))


@pytest.mark.timeout(600)
def test_the_run_form_shows_sections_choices_and_descriptions(server: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEPLOY],
        env=os.environ | {"PREFECT_API_URL": f"{server}/api", "PREFECT_HOME": str(tmp_path / "client")},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    deployment = done.stdout.split()[-1]
    text = rendered_text(f"{server}/deployments/deployment/{deployment}/run", tmp_path / "profile")
    for section in ("Models", "Prompts", "Reward", "Algorithm", "Sampling", "Optimizer", "Checkpoint"):
        assert section in text, f"the form has no {section}"
    for choice in ("FileData", "PythonData", "ReasoningGymData", "GrpoConfig", "PpoConfig", "RemaxConfig"):
        assert choice in text, f"the form does not offer {choice}"
    assert "The policy to train." in text
    assert "Number of steps." in text
