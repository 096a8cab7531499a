"""A running campaign as one page of Markdown, for an artifact that is updated in place.

Charts are the report's, made to stand alone as pictures: Prefect's UI shows data URIs and no inline SVG.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nereus.config import CampaignConfig
from nereus.record.chart import Line, line_chart, number, stacked_chart, strip_chart
from nereus.record.decisions import read_decisions
from nereus.record.emergencies import read_emergencies
from nereus.record.evaluations import read_evaluations
from nereus.record.report import evaluation_lines, plan_segments
from nereus.record.step import StepRecord
from nereus.record.transitions import read_transitions

NUM_ROWS = 20  # newest decisions and transitions that are shown
STYLE = (
    "<style>svg{--card:#fff;--edge:#e3e3df;--muted:#696d72;--in:#fff;--c0:#2f6fb0;--c1:#c8641b;--c2:#2d8a57;"
    "--c3:#8d4fa8;--c4:#b03a48;--c5:#5b6b7a;--c6:#9a7b12;--c7:#1b8a94;font-family:sans-serif;background:#fff}"
    ".line{fill:none;stroke-width:1.8}.band{fill:var(--c0);opacity:.14}.area{opacity:.85}"
    ".grid{stroke:var(--edge)}.tick{fill:var(--muted);font-size:11px}.end{text-anchor:end}"
    ".mid{text-anchor:middle}.in{fill:var(--in);font-size:11.5px;font-weight:600}.hit{fill:transparent}</style>"
)
Records = Sequence[StepRecord]


def live_page(config: CampaignConfig, records: Records) -> str:
    """Progress, charts, decisions, transitions, emergencies. Reads the run folder's other records."""
    lines = [f"# {config.name}", "", _progress(config, records), ""]
    if records:
        lines += [
            *_charts(records),
            *_evaluations(config.run_folder),
            *_decisions(config.run_folder),
            *_transitions(config.run_folder),
        ]
        lines += [*_emergencies(config.run_folder)]
    lines += ["", f"Everything: `{config.run_folder}`"]
    return "\n".join(lines)


def picture(svg: str, title: str) -> str:
    """A chart as a Markdown image that needs no page around it."""
    alone = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="720" ', 1)
    alone = alone.replace(">", f">{STYLE}", 1)
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(alone.encode()).decode()})"


def _progress(config: CampaignConfig, records: Records) -> str:
    if not records:
        return f"no step of {config.steps} yet"
    last = records[-1]
    done = last.step + 1
    recent = records[-10:]
    left_s = (config.steps - done) * sum(record.step_s for record in recent) / len(recent)
    reward = "–" if last.reward_mean is None else number(last.reward_mean, 3)
    bar = "█" * round(20 * done / config.steps)
    return (
        f"`{bar:░<20}` **{done} of {config.steps} steps**, about {left_s / 60:.1f} min left · "
        f"reward {reward} · length {number(last.length_mean, 3)} · {number(last.tokens_per_s, 3)} tokens/s"
    )


def _charts(records: Records) -> Iterable[str]:
    steps = [record.step for record in records]

    def line(name: str, value: Callable[[StepRecord], float | None]) -> Line:
        return Line(name=name, values=[value(record) for record in records])

    band = ([record.reward_min for record in records], [record.reward_max for record in records])
    reward = [line("reward", lambda record: record.reward_mean)]
    length = [
        line("mean", lambda record: record.length_mean),
        line("p95", lambda record: record.length_p95),
    ]
    stages = list(dict.fromkeys(name for record in records for name in record.stage_s))
    times = [Line(name=name, values=[record.stage_s.get(name) for record in records]) for name in stages]
    memory = [
        line("largest worker, GiB", lambda record: max(record.memory_bytes.values(), default=0) / 2**30)
    ]
    yield from _figure("Reward: mean, shaded from min to max", line_chart(steps, reward, band=band))
    yield from _figure("Response length, tokens: mean, p95", line_chart(steps, length, zero=True))
    named = ", ".join(line.name for line in times)
    yield from _figure(f"Seconds by stage: {named}", stacked_chart(steps, times))
    yield from _figure("Memory: largest worker, GiB", line_chart(steps, memory, zero=True))
    plan = strip_chart(plan_segments(records), steps[0], steps[-1])
    yield from _figure("Plan", plan)


def _evaluations(folder: Path) -> Iterable[str]:
    if evaluations := read_evaluations(folder):
        steps = [record.step for record in evaluations]
        for title, note, lines in evaluation_lines(evaluations):
            named = ", ".join(line.name for line in lines)
            yield from _figure(f"{title} ({note}): {named}", line_chart(steps, lines))


def _figure(title: str, svg: str) -> Iterable[str]:
    yield from (f"**{title}**", "", picture(svg, title), "")


def _decisions(folder: Path) -> Iterable[str]:
    head = ("before step", "verdict", "cause", "why", "step now → then", "move costs")
    rows = []
    for decision in read_decisions(folder)[-NUM_ROWS:]:
        change = decision["change"]
        old_s = change["old_step_s"]
        rows.append(
            (
                str(change["step"]),
                "moves" if decision["admit"] else "stays",
                change["trigger"]["cause"],
                decision["why"],
                f"{'–' if old_s is None else number(old_s, 3)} → {number(change['new_step_s'], 3)} s",
                f"{number(decision['numbers']['transition_s'], 3)} s",
            )
        )
    return _table("Decisions", head, rows)


def _transitions(folder: Path) -> Iterable[str]:
    head = ("before step", "outcome", "seconds", "MB moved", "operations", "graph")
    rows = [
        (
            str(record.step),
            record.outcome + (f": {record.reason}" if record.reason else ""),
            number(record.seconds, 3),
            number(record.bytes / 1e6, 3),
            "; ".join(operation.text for operation in record.operations),
            f"`{record.picture}`",
        )
        for record in read_transitions(folder)[-NUM_ROWS:]
    ]
    return _table("Transitions", head, rows)


def _emergencies(folder: Path) -> Iterable[str]:
    head = ("step", "workers lost", "went on by", "seconds", "steps redone")
    rows = [
        (
            str(record.step),
            ", ".join(map(str, record.gone)),
            str(record.way),
            number(record.seconds, 3),
            str(record.steps_redone),
        )
        for record in read_emergencies(folder)[-NUM_ROWS:]
    ]
    return _table("Emergencies", head, rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    if not rows:
        return
    yield from (f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""
