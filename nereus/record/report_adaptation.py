"""The part of report.html on how a run adapted: why it moved and why not, how it moved, what deaths cost."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from nereus.record.adaptation_tables import Table, adaptation_tables
from nereus.record.chart import number
from nereus.record.emergencies import read_emergencies
from nereus.record.transitions import read_transitions

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
    if tables := adaptation_tables(folder):
        yield "<h2>Adaptation</h2>"
        for table in tables:
            yield from _drawn(table)


def _drawn(table: Table) -> Iterable[str]:
    yield f"<details open><summary>{escape(table.title)} ({len(table.rows)})</summary>"
    yield '<div class="scroll"><table class="left">'
    yield f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in table.head)}</tr>"
    yield from (f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in table.rows)
    yield "</table></div></details>"
