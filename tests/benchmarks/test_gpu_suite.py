"""The GPU suite without a GPU: it refuses to measure, and every section runs on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nereus.kernels.language import HAS_TRITON

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=ROOT,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which the suite would measure")
def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    ended = run()
    assert ended.returncode == 2
    assert "no GPU here" in ended.stderr
    assert "--interpret" in ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: pip install triton")
def test_every_section_runs_on_tiny_shapes(tmp_path: Path) -> None:
    ended = run("--interpret", "--json", str(tmp_path / "suite.json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "suite.json").read_text())
    assert found["interpret"] is True
    sections = {row["section"] for row in found["rows"]}
    assert sections == {
        "log-probs", "regions", "gae", "whitening", "AdamW", "calibration", "shared GPU", "exchange", "m2n",
        "host", "pages", "campaign",
    }  # fmt: skip
    assert all(row["ok"] is None for row in found["rows"]), "tiny shapes claim nothing"
