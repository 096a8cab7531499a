"""The part of report.html on how a run adapted: why it moved and why not, how it moved, what deaths cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nereus.record.chart import number
from nereus.record.decisions import read_decisions
from nereus.record.emergencies import EmergencyRecord, read_emergencies
from nereus.record.transitions import OperationRecord, TransitionRecord, read_transitions

Decisions = Sequence[Mapping[str, Any]]
Facts = list[tuple[str, str, bool]]


def adaptation_facts(folder: Path, total_s: float) -> Facts:
    """(label, text, whether it is a warning) of transitions and emergencies; `total_s` is the time in
    steps.
    """
    facts: Facts = []
    if transitions := read_transitions(folder):
        done = [record for record in transitions if record.outcome == "commit"]
        seconds = sum(record.seconds for record in transitions)
        share = seconds / (total_s + seconds) if seconds else 0.0
        facts.append(("transitions done, of those tried", f"{len(done)} of {len(transitions)}", False))
        facts.append(("time in transitions", f"{number(seconds, 3)} s ({share:.1%})", False))
    if emergencies := read_emergencies(folder):
        seconds = sum(record.seconds for record in emergencies)
        redone = sum(record.steps_redone for record in emergencies)
        facts.append(("emergencies", str(len(emergencies)), True))
        facts.append(("cost of emergencies", f"{number(seconds, 3)} s, {redone} steps redone", True))
    return facts


def adaptation_section(folder: Path) -> Iterable[str]:
    """Tables of decisions, transitions and emergencies; nothing for a run that had none."""
    decisions, transitions = read_decisions(folder), read_transitions(folder)
    emergencies = read_emergencies(folder)
    if not (decisions or transitions or emergencies):
        return
    yield "<h2>Adaptation</h2>"
    yield from _table("Decisions: why yes, why no", DECISION_HEAD, map(_decision, decisions))
    yield from _table("Transitions", TRANSITION_HEAD, map(_transition, transitions))
    yield from _table(
        "Operations of the transitions",
        OPERATION_HEAD,
        (_operation(record, operation) for record in transitions for operation in record.operations),
    )
    yield from _table("Emergencies", EMERGENCY_HEAD, map(_emergency, emergencies))


DECISION_HEAD = ("before step", "verdict", "cause", "what was seen", "why", "step now → then", "move", "plan")
TRANSITION_HEAD = ("before step", "outcome", "seconds", "MB moved", "operations", "to")
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


def _decision(decision: Mapping[str, Any]) -> Sequence[str]:
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


def _transition(record: TransitionRecord) -> Sequence[str]:
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
    )


def _operation(record: TransitionRecord, operation: OperationRecord) -> Sequence[str]:
    return (
        str(record.step),
        operation.text,
        number(operation.bytes / 1e6, 3),
        number(operation.seconds, 3),
        operation.reason,
    )


def _emergency(record: EmergencyRecord) -> Sequence[str]:
    return (
        str(record.step),
        ", ".join(map(str, record.gone)),
        str(record.way),
        number(record.seconds, 3),
        str(record.steps_redone),
        str(record.attempts),
        record.reason.splitlines()[0],
    )


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    told = list(rows)
    if not told:
        return
    yield f'<details open><summary>{escape(title)} ({len(told)})</summary><div class="scroll">'
    yield '<table class="left">'
    yield f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"
    yield from (f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in told)
    yield "</table></div></details>"
