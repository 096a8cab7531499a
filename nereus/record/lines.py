"""Files of JSON lines that a run adds to: decisions, transitions, emergencies, interventions, processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Add a line and flush it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines, in order; empty where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
