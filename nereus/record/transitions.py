"""The transitions of a run: `transitions.jsonl`, one line each, the aborted ones too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

TRANSITIONS_FILE = "transitions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRecord:
    """One transition. `bytes` crossed between workers; `lower_bound` is the least that any plan could
    move.
    """

    step: int
    """The step before which it took place."""
    epoch: int
    outcome: str
    """`commit` or `abort`."""
    reason: str
    """Why it was aborted; empty otherwise."""
    seconds: float
    """From planning to the first weight sync under the new plan."""
    bytes: int
    lower_bound: int
    before: Mapping[str, str]
    """Model-stage to layout and GPUs."""
    after: Mapping[str, str]
    """The same, as planned."""


def append_transition(run_folder: Path, record: TransitionRecord) -> None:
    """Add a line and flush it."""
    with (run_folder / TRANSITIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_transitions(run_folder: Path) -> list[TransitionRecord]:
    """All of a run, in order; empty where there were none."""
    path = run_folder / TRANSITIONS_FILE
    if not path.exists():
        return []
    return [TransitionRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
