"""The golden numbers as a fixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verl_golden import Golden


@pytest.fixture(scope="session")
def golden(shared_data: Path) -> Golden:
    return Golden(json.loads((shared_data / "rl" / "golden_verl_core_algos.json").read_text()))
