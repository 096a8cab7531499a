"""What people changed while a run ran: `interventions.jsonl`, a line for each pause and suspension.

A run that is continued replays the lines that were taken: it goes on with what it was changed to. A setting
that its configuration has otherwise than the line found it stays as it is configured now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nereus.record.lines import append_line, read_lines

INTERVENTIONS_FILE = "interventions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterventionRecord:
    """One intervention before `step`. `waits` is set while a suspended run has not been resumed."""

    step: int
    kind: Literal["pause", "suspend"]
    changes: Mapping[str, Any]
    """What was asked for, without what stays as it is."""
    taken: bool
    over: Mapping[str, Any] = field(default_factory=dict)
    """What the configuration said of them before."""
    why: str = ""
    """Why it was refused."""
    waits: str = ""
    """The flow run that is to be resumed and the key of its input, `RUN KEY`."""


def append_intervention(run_folder: Path, record: InterventionRecord) -> None:
    """Add a line and flush it."""
    append_line(run_folder / INTERVENTIONS_FILE, asdict(record))


def read_interventions(run_folder: Path) -> list[InterventionRecord]:
    """All of a run, in order; empty where there were none."""
    return [InterventionRecord(**line) for line in read_lines(run_folder / INTERVENTIONS_FILE)]
