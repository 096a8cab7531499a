"""A running campaign as one page of Markdown, for an artifact that is updated in place.

Charts are the report's, made to stand alone as pictures: Prefect's UI shows data URIs and no inline SVG.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nereus.config import CampaignConfig
from nereus.record.adaptation_tables import Table, adaptation_tables
from nereus.record.chart import Line, line_chart, number, stacked_chart, strip_chart
from nereus.record.evaluations import read_evaluations
from nereus.record.report import evaluation_lines, plan_segments
from nereus.record.step import StepRecord

NUM_ROWS = 20  # of each table, the newest
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
        lines += [*_charts(records), *_evaluations(config.run_folder)]
        for table in adaptation_tables(config.run_folder):
            lines += _drawn(table)
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


def _drawn(table: Table) -> Iterable[str]:
    yield from (f"## {table.title}", "", f"| {' | '.join(table.head)} |", f"|{'---|' * len(table.head)}")
    for row in table.newest(NUM_ROWS).rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""
