"""The timeline of a replay: lengths, GPUs, the plans of each policy, seconds a step, transitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from nereus.planner.replay_run import Run, StepRow


def draw_replay(runs: Sequence[Run], path: Path, title: str) -> None:
    """Write a PNG. Loads matplotlib, which takes about a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        3,
        1,
        figsize=(11, 5.5 + 0.45 * len(runs)),
        sharex=True,
        layout="constrained",
        height_ratios=(2, 0.5 * len(runs) + 0.5, 4),
    )
    colours = pyplot.get_cmap("tab10")
    _conditions(axes[0], runs[0].rows)
    _bands(axes[1], runs, pyplot.get_cmap("tab20"))
    for number, run in enumerate(runs):
        _latency(axes[2], run, colours(number % 10))
    axes[0].set_title(title)
    axes[2].set(yscale="log", xlabel="step", ylabel="seconds a step")
    axes[2].grid(alpha=0.3)
    axes[2].legend(fontsize=8, title="mean; triangles: transitions", title_fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _conditions(axes: Any, rows: Sequence[StepRow]) -> None:
    steps = [row.step for row in rows]
    axes.plot(steps, [row.length_mean for row in rows], color="black", lw=1)
    axes.set(ylabel="mean length (tokens)", yscale="log")
    right = axes.twinx()
    right.step(steps, [row.num_gpus for row in rows], where="post", color="tab:blue", lw=1.5)
    right.set_ylabel("GPUs", color="tab:blue")
    right.set_ylim(bottom=0)
    for row in rows:
        if row.compute < 1 or row.network < 1:
            axes.axvspan(
                row.step, row.step + 1, color="tab:red" if row.compute < 1 else "tab:orange", alpha=0.12, lw=0
            )


def _bands(axes: Any, runs: Sequence[Run], colours: Any) -> None:
    """A bar for each policy; another colour is another plan, the same plan has one colour everywhere."""
    plans: dict[str, int] = {}
    for level, run in enumerate(runs):
        for plan, group in groupby(run.rows, key=lambda row: row.plan):
            rows = list(group)
            colour = "white" if not plan else colours(plans.setdefault(plan, len(plans)) % 20)
            axes.barh(level, len(rows), left=rows[0].step, height=0.8, color=colour, align="center")
    axes.set_yticks(range(len(runs)), [run.policy for run in runs], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylabel("plans")


def _latency(axes: Any, run: Run, colour: Any) -> None:
    steps = [row.step for row in run.rows]
    axes.plot(
        steps,
        [row.step_s or float("nan") for row in run.rows],
        color=colour,
        lw=1.2,
        label=f"{run.policy}: {run.mean_step_s:.4g} s",
    )
    moved = [row for row in run.rows if row.num_transitions]
    axes.plot(
        [row.step for row in moved],
        [row.total_s for row in moved],
        "v",
        color=colour,
        ms=4,
    )
