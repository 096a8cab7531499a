"""How `nereus replay` shows runs: a table of policies, the decisions of one, every step as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from nereus.planner.conditions import Trace
from nereus.planner.replay_run import Run


def replay_view(runs: Sequence[Run], trace: Trace, title: str) -> Table:
    """One row a policy; the shortest mean step is marked."""
    best = min(run.mean_step_s for run in runs)
    table = Table(
        title=f"{title}: {len(trace.steps)} steps, up to {trace.most_nodes} nodes", title_justify="left"
    )
    for name in (
        "policy",
        "mean step",
        "over best",
        "transitions",
        "their time",
        "restarts",
        "redone",
        "stalled",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for run in sorted(runs, key=lambda run: run.mean_step_s):
        table.add_row(
            run.policy,
            f"{run.mean_step_s:.4g} s",
            f"+{run.mean_step_s / best - 1:.2%}",
            str(run.num_transitions),
            f"{run.transition_share:.2%}",
            str(run.num_restarts),
            f"{run.redone_s / run.total_s:.2%}",
            f"{run.stalled_s / run.total_s:.2%}",
            style="bold" if run.mean_step_s == best else "",
        )
    return table


def decisions_view(run: Run) -> Table:
    """Every decision of a run: when, because of what, the verdict and why."""
    table = Table(title=f"Decisions of {run.policy}", title_justify="left")
    for name in ("step", "cause", "gain", "costs", "verdict", "why"):
        table.add_column(name, justify="right" if name in ("step", "gain", "costs") else "left")
    for row in run.rows:
        for decision in row.decisions:
            numbers = decision.numbers
            table.add_row(
                str(row.step),
                str(decision.change.trigger.cause),
                f"{numbers['gain_s']:.3g} s",
                f"{numbers['transition_s']:.3g} s",
                "move" if decision.admit else "stay",
                decision.why,
            )
    return table


_COLUMNS = (
    "step",
    "step_s",
    "transition_s",
    "redone_s",
    "stalled_s",
    "num_gpus",
    "used_gpus",
    "length_mean",
    "compute",
    "network",
    "num_transitions",
    "num_restarts",
    "plan",
)


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Every step of every policy, one line each."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "trace", *_COLUMNS))
        for run in runs:
            for row in run.rows:
                values = (
                    row.step,
                    row.step_s,
                    row.transition_s,
                    row.redone_s,
                    row.stalled_s,
                    row.num_gpus,
                    row.used_gpus,
                    row.length_mean,
                    row.compute,
                    row.network,
                    row.num_transitions,
                    row.num_restarts,
                    row.plan,
                )
                writer.writerow((run.policy, run.trace, *values))
