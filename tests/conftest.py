"""Fixtures that many tests share: where the measured data lies, and a fixed seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Without a GPU Triton kernels run in Triton's interpreter; it is chosen when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let two processes share the suite (`pytest -n 2 --dist loadgroup`): files stay whole. The flow tests,
    which share one Prefect server and one Ray, stay together and begin first, for they take longest.
    """
    flows = ROOT / "tests" / "flows"
    items.sort(key=lambda item: not item.path.is_relative_to(flows))
    for item in items:
        together = flows if item.path.is_relative_to(flows) else item.path
        item.add_marker(pytest.mark.xdist_group(str(together.relative_to(ROOT))))


def find_shared_data() -> Path | None:
    """The folder of measured data: `$NEREUS_DATA`, else `../shared/data` beside the repository."""
    named = os.environ.get("NEREUS_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data; the test is skipped where it is absent."""
    folder = find_shared_data()
    if folder is None:
        pytest.skip("measured data is absent: set NEREUS_DATA to the folder that holds perf/, rl/ and real/")
    return folder
