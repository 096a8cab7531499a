"""How a run adapted, as tables of text: why it moved and why not, how it moved, what deaths cost.

Read from the run folder; whoever shows them draws them in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.record.chart import number
from nereus.record.decisions import read_decisions
from nereus.record.emergencies import EmergencyRecord, read_emergencies
from nereus.record.processes import ProcessesRecord, read_processes
from nereus.record.transitions import OperationRecord, TransitionRecord, read_transitions

Row = tuple[str, ...]

DECISION_HEAD = ("before step", "verdict", "cause", "what was seen", "why", "step now → then", "move", "plan")
TRANSITION_HEAD = ("before step", "outcome", "seconds", "MB moved", "operations", "to", "picture")
OPERATION_HEAD = ("before step", "operation", "MB sent", "seconds", "failed because")
EMERGENCY_HEAD = (
    "step",
    "workers lost",
    "went on by",
    "seconds",
    "steps redone",
    "recoveries",
    "first failure",
)
PROCESSES_HEAD = ("before step", "what", "processes", "calls a step", "seconds a call", "CPU", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a head, oldest first."""

    title: str
    head: Row
    rows: tuple[Row, ...]

    def newest(self, num_rows: int) -> Table:
        """The same with the last rows only."""
        return Table(title=self.title, head=self.head, rows=self.rows[-num_rows:])


def adaptation_tables(folder: Path) -> tuple[Table, ...]:
    """Decisions, transitions, their operations, emergencies, and numbers of reward and tool processes of the
    run; those without rows are left out.
    """
    transitions = read_transitions(folder)
    tables = (
        _table("Decisions: why yes, why no", DECISION_HEAD, map(_decision, read_decisions(folder))),
        _table("Transitions", TRANSITION_HEAD, map(_transition, transitions)),
        _table(
            "Operations of the transitions",
            OPERATION_HEAD,
            (_operation(record, operation) for record in transitions for operation in record.operations),
        ),
        _table("Emergencies", EMERGENCY_HEAD, map(_emergency, read_emergencies(folder))),
        _table("Reward and tool processes", PROCESSES_HEAD, map(_processes, read_processes(folder))),
    )
    return tuple(table for table in tables if table.rows)


def _table(title: str, head: Row, rows: Iterable[Row]) -> Table:
    return Table(title=title, head=head, rows=tuple(rows))


def _decision(decision: Mapping[str, Any]) -> Row:
    change = decision["change"]
    old_s = change["old_step_s"]
    return (
        str(change["step"]),
        "moves" if decision["admit"] else "stays",
        change["trigger"]["cause"],
        change["trigger"]["text"],
        decision["why"],
        f"{'–' if old_s is None else number(old_s, 3)} → {number(change['new_step_s'], 3)} s",
        f"{number(decision['numbers']['transition_s'], 3)} s",
        change["new"],
    )


def _transition(record: TransitionRecord) -> Row:
    kinds = [operation.kind for operation in record.operations]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    moved = (f"{name} {text}" for name, text in record.after.items() if record.before.get(name) != text)
    return (
        str(record.step),
        record.outcome + (f": {record.reason}" if record.reason else ""),
        number(record.seconds, 3),
        number(record.bytes / 1e6, 3),
        counted,
        "; ".join(moved),
        record.picture,
    )


def _operation(record: TransitionRecord, operation: OperationRecord) -> Row:
    return (
        str(record.step),
        operation.text,
        number(operation.bytes / 1e6, 3),
        number(operation.seconds, 3),
        operation.reason,
    )


def _emergency(record: EmergencyRecord) -> Row:
    return (
        str(record.step),
        ", ".join(map(str, record.gone)),
        str(record.way),
        number(record.seconds, 3),
        str(record.steps_redone),
        str(record.attempts),
        record.reason.partition("\n")[0],
    )


def _processes(record: ProcessesRecord) -> Row:
    return (
        str(record.step),
        record.what,
        f"{record.before} → {record.number}",
        number(record.num_calls, 3),
        number(record.call_s, 3),
        f"{record.cpu_share:.0%}",
        record.why,
    )
