"""The golden numbers as a fixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from verl_golden import Golden


@pytest.fixture(scope="session")
def golden(shared_data: Path) -> Golden:
    return Golden(json.loads((shared_data / "rl" / "golden_verl_core_algos.json").read_text()))


@pytest.fixture(scope="session")
def trl(shared_data: Path) -> dict[str, Any]:
    """TRL's losses and gradients on the same inputs, by the names of its `loss_type`."""
    values: dict[str, Any] = json.loads((shared_data / "rl" / "golden_trl_grpo.json").read_text())
    return values
