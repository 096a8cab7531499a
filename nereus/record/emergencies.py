"""The emergencies of a run: `emergencies.jsonl`, one line each time workers died and the job went on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from nereus.record.lines import append_line, read_lines

EMERGENCIES_FILE = "emergencies.jsonl"


class Way(StrEnum):
    """How a job went on: by a transition to who was left, from copies on peers, or from storage."""

    TRANSITION = "transition"
    PEER_COPY = "peer copy"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmergencyRecord:
    """One emergency. `seconds` are from the failure that was seen until the job could go on."""

    step: int
    """The step in which, or before which, workers died."""
    gone: Sequence[int]
    """The workers that died, those that died in the recovery too."""
    way: Way
    attempts: int
    """Recoveries that were begun; more than 1 where a worker died in one."""
    seconds: float
    steps_redone: int
    """Completed steps that were lost, and done again."""
    reason: str
    """The failure that was seen first."""


def append_emergency(run_folder: Path, record: EmergencyRecord) -> None:
    """Add a line and flush it."""
    append_line(run_folder / EMERGENCIES_FILE, asdict(record))


def read_emergencies(run_folder: Path) -> list[EmergencyRecord]:
    """All of a run, in order; empty where there were none."""
    lines = read_lines(run_folder / EMERGENCIES_FILE)
    return [EmergencyRecord(**line | {"way": Way(line["way"])}) for line in lines]
