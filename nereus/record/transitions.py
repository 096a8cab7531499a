"""The transitions of a run: `transitions.jsonl`, one line each, the aborted ones too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereus.record.lines import append_line, read_lines

TRANSITIONS_FILE = "transitions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One operation of a transition, as it was carried out."""

    id: str
    kind: str
    """`split`, `merge`, `extend`, `destroy`, or `spill`: room was made by way of host memory."""
    model_stage: str
    text: str
    """Units, layouts, GPUs and planned bytes, for people."""
    after: Sequence[str]
    """The operations that it waited for."""
    gpus: Sequence[int]
    """The GPUs of the units that it touched."""
    bytes: int
    """Bytes that its workers sent to one another; of a spill, those that they put into host memory."""
    planned_bytes: int
    """Bytes of its reshard plan."""
    seconds: float
    """Of the slowest of its workers."""
    carrier: str | None
    """The operation with which its bytes travelled, None where it carries its own."""
    reason: str = ""
    """Why it failed; empty otherwise."""


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
    operations: Sequence[OperationRecord]
    """In the order of the schedule."""
    picture: str
    """The graph of operations, drawn into this file of the run folder."""
    bounded: Sequence[str] = ()
    """Model-stages that were moved in bounded mode: after the decision, each shard freed as it moved."""
    halfway: bool = False
    """Whether it led to units from which the next line leads on to the plan, because of memory."""
    spilled_bytes: int = 0
    """Bytes of old shards that made room by way of host memory, as planned."""
    retry_step: int | None = None
    """The step before which the same plan may be tried again; None after a commit."""


def append_transition(run_folder: Path, record: TransitionRecord) -> None:
    """Add a line and flush it."""
    append_line(run_folder / TRANSITIONS_FILE, asdict(record))


def read_transitions(run_folder: Path) -> list[TransitionRecord]:
    """All of a run, in order; empty where there were none."""
    return [_record(line) for line in read_lines(run_folder / TRANSITIONS_FILE)]


def _record(fields: dict[str, Any]) -> TransitionRecord:
    operations = [OperationRecord(**operation) for operation in fields.pop("operations")]
    return TransitionRecord(**fields, operations=operations)


def told(record: TransitionRecord) -> str:
    """A transition for people, its operations with the bytes and seconds that they took."""
    megabytes = record.bytes / 1e6
    lines = [
        f"before step {record.step}: {record.outcome} in {record.seconds:.3g} s, {megabytes:.3g} MB planned"
        + (f"; bounded: {', '.join(record.bounded)}" if record.bounded else "")
        + ("; halfway" if record.halfway else "")
        + (f"; {record.spilled_bytes / 1e6:.3g} MB spilled" if record.spilled_bytes else "")
        + (f"; {record.reason}" if record.reason else "")
        + ("" if record.retry_step is None else f"; not tried again before step {record.retry_step}")
    ]
    number = {operation.id: at for at, operation in enumerate(record.operations)}
    for at, operation in enumerate(record.operations):
        after = ", ".join(f"({number[name]})" for name in operation.after)
        verb = "copied" if operation.kind == "spill" else "sent"
        took = "" if operation.carrier else f"; {verb} {operation.bytes} B in {operation.seconds:.3g} s"
        lines.append(f"  ({at}) {operation.text}{took}" + (f"; after {after}" if after else ""))
    return "\n".join(lines)
