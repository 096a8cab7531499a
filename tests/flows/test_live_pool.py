"""The closed loop live: answers grow, GPUs come and go, a node dies, another drains, and nothing is lost.

`live_pool` runs in a process of its own, since its Ray is a cluster of several logical nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REWARD_TOLERANCE = 0.02
"""Of a step's mean reward. Layouts sum in another order, so a token of nearly equal chances may come out
differently; one answer that ends elsewhere moves the mean of 128 by at most 1/64."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_whose_answers_and_pool_change_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    quiet = {"OMP_NUM_THREADS": "1", "PREFECT_LOGGING_LEVEL": "CRITICAL"}
    subprocess.run(
        [sys.executable, "-m", "tests.flows.live_pool", str(tmp_path)],
        cwd=root,
        env=os.environ | quiet,
        check=True,
        timeout=1700,
    )
    found = json.loads((tmp_path / "figures.json").read_text())
    gpus, lengths = found["gpus"], found["lengths"][1]
    assert lengths[0] < 10
    assert lengths[-1] > 100
    assert gpus[0] == 4
    assert max(gpus) == 8
    assert 3 in gpus[gpus.index(8) :]
    assert gpus[-1] == 6
    done = [record for record in found["transitions"] if record["outcome"] == "commit"]
    assert len(done) >= 4
    assert all(record["bytes"] == record["bound"] for record in done)
    assert set(found["operations"]) == {"split", "merge", "extend", "destroy"}
    admitted = {decision["cause"] for decision in found["decisions"] if decision["admit"]}
    assert admitted & {"length", "memory violation"}
    assert "GPUs lost" in admitted
    (emergency,) = found["emergencies"]  # the drained node was left in time
    assert (len(emergency["gone"]), emergency["redone"]) == (3, 0)
    assert found["left_before_deadline_s"] > 0
    # No prompt is lost or doubled, and every step learned under the version that it should have.
    assert found["samples"][0] == found["samples"][1]
    assert found["versions"][0] == found["versions"][1]
    assert found["positions"][0] == found["positions"][1]
    assert found["rewards"][1] == pytest.approx(found["rewards"][0], abs=REWARD_TOLERANCE)
