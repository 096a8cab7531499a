"""Changes of the number of reward and tool processes: `processes.jsonl`, a line a change with its numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

PROCESSES_FILE = "processes.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesRecord:
    """A change before `step`. The rest is what was seen of calls, and what was expected of both numbers, see
    `planner/processes.py`.
    """

    step: int
    what: Literal["reward", "tool"]
    before: int
    number: int
    num_calls: float
    call_s: float
    longest_s: float
    cpu_share: float
    window_s: float
    limit_s: float
    cores: float
    why: str


def append_processes(run_folder: Path, record: ProcessesRecord) -> None:
    """Add a line and flush it."""
    with (run_folder / PROCESSES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_processes(run_folder: Path) -> list[ProcessesRecord]:
    """All of a run, in order; empty where there were none."""
    path = run_folder / PROCESSES_FILE
    if not path.exists():
        return []
    return [ProcessesRecord(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
