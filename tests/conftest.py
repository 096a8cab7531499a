"""Fixtures that many tests share: where the measured data lies, and a fixed seed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a GPU Triton kernels run in Triton's interpreter; it is chosen when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
FLOWS = "tests/flows/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The flow tests begin first: they take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(FLOWS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let processes share the suite (`pytest -n 2`) by file; the flow tests, which share one Prefect server
    and one Ray, stay together.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return FLOWS if nodeid.startswith(FLOWS) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


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
