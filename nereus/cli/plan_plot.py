"""The picture of a sweep: the best step, how much longer each plan takes where held, and where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nereus.planner.plan import Plan
from nereus.planner.sweep import Sweep

_LABELS = {
    "response-len": "longest response (tokens)",
    "prompt-len": "prompt (tokens)",
    "batch": "prompts a step",
}


def draw_sweep(name: str, result: Sweep, path: Path, title: str) -> None:
    """Write a PNG. Loads matplotlib, which takes about a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    values = np.asarray(result.values)
    best = np.array([np.nan if plan is None else plan.step_s for plan in result.plans])
    colours = pyplot.get_cmap("tab10")
    for number, segment in enumerate(result.segments):
        colour = colours(number % 10)
        for axes in (above, below):
            axes.axvspan(*_span(values, segment.first, segment.last), color=colour, alpha=0.15, lw=0)
        held = np.array([np.nan if step is None else step for step in segment.step_s])
        slower = 100 * (held / best - 1)
        below.plot(values, slower, color=colour, marker=".", lw=1.5, label=_label(segment.plan))
        last = int(np.flatnonzero(~np.isnan(held))[-1])
        if last < len(values) - 1:
            below.plot(values[last], slower[last], "x", color=colour, ms=10, mew=2.5)
    above.plot(values, best, color="black", lw=2, marker="o", ms=4)
    above.set(yscale="log", ylabel="step of the best plan (s)", title=title)
    below.set(xscale="log", xlabel=_LABELS[name], ylabel="longer than the best (%)")
    below.set_xticks(values, [f"{value:g}" for value in values], rotation=45)
    _finish(above, below)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _span(values: np.ndarray[Any, Any], first: int, last: int) -> tuple[float, float]:
    """From half way to the point before to half way to the point after, on a logarithmic axis."""
    low = values[first] if first == 0 else np.sqrt(values[first - 1] * values[first])
    high = values[last] if last == len(values) - 1 else np.sqrt(values[last] * values[last + 1])
    return float(low), float(high)


def _finish(above: Any, below: Any) -> None:
    for axes in (above, below):
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    below.legend(
        fontsize=7,
        title="each plan held; shade: where it is best; ×: it fits no further",
        title_fontsize=7,
        loc="best",
    )


def _label(plan: Plan) -> str:
    shown = {str(item.model_stage): item.text for item in plan.assignments}
    return f"generation {shown['actor.generation']} | training {shown['actor.training']}"
