"""The decisions of a run that adapts: `decisions.jsonl`, every proposed change with all its numbers,
admitted or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DECISIONS_FILE = "decisions.jsonl"


def append_decision(run_folder: Path, decision: Mapping[str, Any]) -> None:
    """Add a line and flush it."""
    with (run_folder / DECISIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(decision) + "\n")


def read_decisions(run_folder: Path) -> list[dict[str, Any]]:
    """All of a run, in order; empty where there were none."""
    path = run_folder / DECISIONS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
