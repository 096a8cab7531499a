"""Changes of the number of reward and tool processes: `processes.jsonl`, a line a change with its numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from nereus.record.lines import append_line, read_lines

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
    append_line(run_folder / PROCESSES_FILE, asdict(record))


def read_processes(run_folder: Path) -> list[ProcessesRecord]:
    """All of a run, in order; empty where there were none."""
    return [ProcessesRecord(**line) for line in read_lines(run_folder / PROCESSES_FILE)]
