"""`nereus watch`: a run in the terminal, or on a page, from its folder alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereus.errors import DataError, explain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nereus.record.step import StepRecord

BARS = "▁▂▃▄▅▆▇█"
REFRESH_S = 1.0
NUM_STEPS = 8


def watch(
    run: Annotated[
        str, typer.Argument(help="The run's folder, or its name under --output.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
) -> None:
    """Watch a run: rewards, lengths, stages, plans, decisions and transitions as they come.

    It reads the run's folder only, so it can be started and stopped at any time, for a finished run too.
    """
    from rich.console import Console
    from rich.live import Live

    folder = run_folder(run, output)
    console = Console()
    if once:
        console.print(view(folder))
        return
    try:
        with Live(view(folder), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(view(folder), refresh=True)
    except KeyboardInterrupt:
        return


def run_folder(run: str, output: Path) -> Path:
    """The folder of a run. Raises DataError when there is none."""
    from nereus.record.metrics import METRICS_FILE

    for folder in (Path(run), output / run):
        if (folder / METRICS_FILE).exists():
            return folder
    known = sorted(path.parent.name for path in output.glob(f"*/{METRICS_FILE}"))
    raise DataError(
        explain(
            f"cannot watch {run}",
            values=f"neither {run} nor {output / run} holds {METRICS_FILE}",
            rule="a run writes it from its first step on",
            remedy=f"runs under {output}: {', '.join(known) or 'none'}",
        )
    )


def view(folder: Path) -> RenderableType:
    """Everything on one screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from nereus.record.decisions import read_decisions
    from nereus.record.emergencies import read_emergencies
    from nereus.record.metrics import METRICS_FILE, read_records
    from nereus.record.transitions import read_transitions, told

    records = read_records(folder / METRICS_FILE)
    if not records:
        return Text(f"{folder.name}: no step yet")
    last = records[-1]
    parts: list[RenderableType] = [
        Text(f"{folder.name}: {last.step + 1} steps, policy version {last.version}", style="bold"),
        _curves(records),
        _steps(records[-NUM_STEPS:]),
    ]
    plan = Table.grid(padding=(0, 2))
    for stage, text in last.plan.items():
        plan.add_row(Text(stage, style="cyan"), text)
    parts.append(plan)
    for decision in read_decisions(folder)[-3:]:
        verdict = "moves" if decision["admit"] else "stays"
        parts.append(Text(f"before step {decision['change']['step']}: {verdict}; {decision['why']}"))
    parts += [Text(told(record)) for record in read_transitions(folder)[-2:]]
    parts += [
        Text(f"step {record.step}: lost {list(record.gone)}, on by {record.way}", style="red")
        for record in read_emergencies(folder)[-2:]
    ]
    return Group(*parts)


def _curves(records: Sequence[StepRecord]) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, values in (
        ("reward", [record.reward_mean for record in records]),
        ("length", [record.length_mean for record in records]),
        ("seconds", [record.step_s for record in records]),
    ):
        present = [value for value in values if value is not None]
        if present:
            table.add_row(name, sparkline(present), f"{present[0]:.4g} → {present[-1]:.4g}")
    return table


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """One character for each stretch of values, from the lowest to the highest."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for at in range(0, len(values), size) if (part := values[at : at + size])]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] for mean in means)


def _steps(records: Sequence[StepRecord]) -> RenderableType:
    from rich.table import Table

    stages = list(dict.fromkeys(name for record in records for name in record.stage_s))
    table = Table("step", "reward", "length", "seconds", *stages, box=None)
    for record in records:
        reward = "–" if record.reward_mean is None else f"{record.reward_mean:.4g}"
        seconds = (f"{record.stage_s[name]:.2f}" if name in record.stage_s else "" for name in stages)
        table.add_row(str(record.step), reward, f"{record.length_mean:.1f}", f"{record.step_s:.2f}", *seconds)
    return table
