"""The decisions of a run that adapts: `decisions.jsonl`, every proposed change with all its numbers,
admitted or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus.record.lines import append_line, read_lines

DECISIONS_FILE = "decisions.jsonl"


def append_decision(run_folder: Path, decision: Mapping[str, Any]) -> None:
    """Add a line and flush it."""
    append_line(run_folder / DECISIONS_FILE, decision)


def read_decisions(run_folder: Path) -> list[dict[str, Any]]:
    """All of a run, in order; empty where there were none."""
    return read_lines(run_folder / DECISIONS_FILE)
