"""report.html: a run on one page that needs no network. Written from metrics.jsonl and the configuration."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template

import yaml

from nereus.config import CampaignConfig
from nereus.record.chart import (
    NUM_COLOURS,
    SMALL,
    Line,
    Segment,
    line_chart,
    number,
    stacked_chart,
    strip_chart,
)
from nereus.record.evaluations import EvaluationRecord, read_evaluations
from nereus.record.metrics import METRICS_FILE, read_records
from nereus.record.report_adaptation import adaptation_facts, adaptation_section
from nereus.record.step import StepRecord

REPORT_FILE = "report.html"
PACKAGES = (
    "nereus-rl",
    "torch",
    "ray",
    "prefect",
    "transformers",
    "safetensors",
    "numpy",
    "vllm",
    "megatron-core",
)
Records = Sequence[StepRecord]


def write_report(folder: Path, config: CampaignConfig) -> Path:
    """Write `<folder>/report.html` from the records of the run so far; return its path.

    Raises DataError when metrics.jsonl is damaged.
    """
    path = folder / REPORT_FILE
    draft = path.with_suffix(".draft")
    draft.write_text(render_report(read_records(folder / METRICS_FILE), config, folder), encoding="utf-8")
    draft.replace(path)
    return path


def render_report(records: Records, config: CampaignConfig, folder: Path) -> str:
    """The page as text; `folder` has the run's other records."""
    algorithm = config.algorithm.kind.upper()
    subtitle = (
        f"{algorithm} on {Path(config.models.actor).name}, {len(records)} of {config.steps} steps recorded"
    )
    body = ["<p>No step yet.</p>"]
    if records:
        body = [
            *_facts(records, folder),
            *_charts(records),
            *_evaluations(read_evaluations(folder)),
            *adaptation_section(folder),
            *_statistics(records),
        ]
    body += [*_appendix(records, config)]
    template = Template(files("nereus.record").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(config.name), subtitle=escape(subtitle), body="\n".join(body))


def _facts(records: Records, folder: Path) -> Iterable[str]:
    first, last = records[0], records[-1]
    total_s = sum(record.step_s for record in records)
    tokens = sum(record.prompt_tokens + record.response_tokens for record in records)
    missing = sum(record.num_missing_rewards for record in records)
    overhead = sum(record.overhead_s for record in records) / total_s if total_s else 0.0
    told = [
        ("reward, first to last step", f"{_reward(first)} → {_reward(last)}", False),
        (
            "mean length, first to last",
            f"{number(first.length_mean, 3)} → {number(last.length_mean, 3)}",
            False,
        ),
        ("time in steps", _duration(total_s), False),
        ("tokens a second", number(tokens / total_s, 3) if total_s else "–", False),
        (
            "largest memory of a worker",
            _gib(max((m for r in records for m in r.memory_bytes.values()), default=0)),
            False,
        ),
        ("missing rewards", str(missing), missing > 0),
        ("overhead of a step", f"{overhead:.1%}", False),
        *adaptation_facts(folder, total_s),
    ]
    yield '<div class="facts">'
    for label, text, warn in told:
        style = "fact warn" if warn else "fact"
        yield f'<div class="{style}"><b>{escape(text)}</b><span>{escape(label)}</span></div>'
    yield "</div>"


def _charts(records: Records) -> Iterable[str]:
    steps = [record.step for record in records]

    def line(name: str, value: Callable[[StepRecord], float | None]) -> Line:
        return Line(name=name, values=[value(record) for record in records])

    reward = [line("mean", lambda record: record.reward_mean)]
    band = ([record.reward_min for record in records], [record.reward_max for record in records])
    length = [
        line("mean", lambda record: record.length_mean),
        line("p95", lambda record: record.length_p95),
        line("max", lambda record: record.length_max),
    ]
    stages = list(dict.fromkeys(name for record in records for name in record.stage_s))
    times = [Line(name=name, values=[record.stage_s.get(name) for record in records]) for name in stages]
    times.append(line("overhead", lambda record: record.overhead_s))
    throughput = [line("tokens/s", lambda record: record.tokens_per_s)]
    workers = list(dict.fromkeys(name for record in records for name in record.memory_bytes))
    memory = [
        Line(name=worker, values=[_in_gib(record.memory_bytes.get(worker)) for record in records])
        for worker in workers
    ]
    yield '<h2>Course of the run</h2><div class="charts">'
    yield _figure("Reward", "mean, shaded from min to max", reward, line_chart(steps, reward, band=band))
    yield _figure("Response length", "tokens", length, line_chart(steps, length, zero=True))
    yield _figure(
        "Stage times", "seconds, stacked; concurrent ones overlap", times, stacked_chart(steps, times)
    )
    yield _figure(
        "Throughput",
        "prompt and response tokens a second",
        throughput,
        line_chart(steps, throughput, zero=True),
    )
    yield (
        _figure("Peak memory", "GiB a worker", memory, line_chart(steps, memory, zero=True)) if memory else ""
    )
    if any(record.num_missing_rewards for record in records):
        missing = [line("missing", lambda record: record.num_missing_rewards)]
        yield _figure("Missing rewards", "responses a step", missing, line_chart(steps, missing, zero=True))
    plan = strip_chart(plan_segments(records), steps[0], steps[-1])
    yield _figure("Plan", "where every model-stage ran, over the steps", [], plan, style="wide")
    yield "</div>"


def _evaluations(evaluations: Sequence[EvaluationRecord]) -> Iterable[str]:
    if not evaluations:
        return
    last = evaluations[-1]
    steps = [record.step for record in evaluations]
    answers = "one greedy answer" if last.num_samples == 1 else f"{last.num_samples} sampled answers"
    yield f"<h2>Evaluation</h2><p>{last.num_prompts} held-out prompts, {answers} each.</p>"
    yield '<div class="charts">'
    for title, note, lines in evaluation_lines(evaluations):
        yield _figure(title, note, lines, line_chart(steps, lines))
    yield "</div>"
    head = ("step", "reward", *(f"pass@{k}" for k in last.pass_at), "length", "cut", "missing", "seconds")
    yield '<details><summary>Every evaluation</summary><div class="scroll"><table><tr>'
    yield "".join(f"<th>{name}</th>" for name in head) + "</tr>"
    for record in evaluations:
        reward = "–" if record.reward_mean is None else number(record.reward_mean, 3)
        passed = (record.pass_at.get(k) for k in last.pass_at)
        told = [
            str(record.step),
            reward,
            *("–" if share is None else number(share, 3) for share in passed),
            number(record.length_mean, 3),
            str(record.num_cut),
            str(record.num_missing_rewards),
            number(record.seconds, 3),
        ]
        yield f"<tr>{''.join(f'<td>{text}</td>' for text in told)}</tr>"
    yield "</table></div></details>"


def evaluation_lines(evaluations: Sequence[EvaluationRecord]) -> list[tuple[str, str, list[Line]]]:
    """(title, note, lines) of the charts of evaluations; one value an evaluation."""
    ks = list(dict.fromkeys(k for record in evaluations for k in record.pass_at))
    passed = [Line(name=f"pass@{k}", values=[record.pass_at.get(k) for record in evaluations]) for k in ks]
    reward = [Line(name="reward", values=[record.reward_mean for record in evaluations])]
    return [
        ("Held-out reward", "mean", reward),
        *([("pass@k", "share of held-out prompts, estimated without bias", passed)] if passed else []),
    ]


def plan_segments(records: Records) -> dict[str, list[Segment]]:
    """For every model-stage, the stretches of steps in which its plan stayed the same."""
    rows: dict[str, list[Segment]] = {}
    for record in records:
        for stage, text in record.plan.items():
            row = rows.setdefault(stage, [])
            if row and row[-1].text == text:
                row[-1] = Segment(first=row[-1].first, last=record.step, text=text)
            else:
                row.append(Segment(first=record.step, last=record.step, text=text))
    return rows


def _statistics(records: Records) -> Iterable[str]:
    steps = [record.step for record in records]
    names = list(dict.fromkeys(name for record in records for name in record.stats))
    lines = [Line(name=name, values=[record.stats.get(name) for record in records]) for name in names]
    lines.append(Line(name="learning_rate", values=[record.learning_rate for record in records]))
    yield '<h2>Training statistics</h2><div class="charts small">'
    yield from (_figure(line.name, "", [line], line_chart(steps, [line], size=SMALL)) for line in lines)
    yield "</div>"


def _appendix(records: Records, config: CampaignConfig) -> Iterable[str]:
    head = ("step", "reward", "length", "p95", "max", "missing", "tokens/s", "seconds")
    yield "<h2>Details</h2>"
    if records:
        yield '<details><summary>Every step</summary><div class="scroll"><table><tr>'
        yield "".join(f"<th>{name}</th>" for name in head) + "</tr>"
        for record in records:
            numbers = (record.length_mean, record.length_p95, record.length_max, record.num_missing_rewards)
            told = [
                str(record.step),
                _reward(record),
                *map(number, (*numbers, record.tokens_per_s, record.step_s)),
            ]
            yield f"<tr>{''.join(f'<td>{text}</td>' for text in told)}</tr>"
        yield "</table></div></details>"
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    yield f"<details><summary>Configuration</summary><pre>{escape(text)}</pre></details>"
    yield '<details><summary>Versions</summary><table class="left">'
    yield from (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in versions())
    yield "</table></details>"


def versions() -> list[tuple[str, str]]:
    """What the run was made with; packages that are not installed are left out."""
    found = [("python", platform.python_version()), ("platform", platform.platform())]
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found


def _figure(title: str, note: str, lines: Sequence[Line], drawing: str, *, style: str = "") -> str:
    legend = ""
    if len(lines) > 1:
        marks = "".join(
            f'<span><i style="background:var(--c{i % NUM_COLOURS})"></i>{escape(line.name)}</span>'
            for i, line in enumerate(lines)
        )
        legend = f'<div class="legend">{marks}</div>'
    heading = f"<h3>{escape(title)} <small>{escape(note)}</small></h3>"
    return f'<figure class="{style}">{heading}{legend}{drawing}</figure>'


def _reward(record: StepRecord) -> str:
    return "–" if record.reward_mean is None else number(record.reward_mean, 3)


def _in_gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 2**30


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{seconds:.1f} s"
    )
