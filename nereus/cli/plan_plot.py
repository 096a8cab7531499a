"""The picture of a sweep: step time of the best plan, of each plan held, and where one ends."""

from __future__ import annotations

from pathlib import Path

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

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    values = np.asarray(result.values)
    colours = pyplot.get_cmap("tab10")
    for number, segment in enumerate(result.segments):
        colour = colours(number % 10)
        held = np.array([np.nan if step is None else step for step in segment.step_s])
        axes.plot(values, held, color=colour, lw=1.2, ls="--", label=_label(segment.plan))
        low = values[0] if segment.first == 0 else np.sqrt(values[segment.first - 1] * values[segment.first])
        last = segment.last == len(values) - 1
        high = values[-1] if last else np.sqrt(values[segment.last] * values[segment.last + 1])
        axes.axvspan(low, high, color=colour, alpha=0.12, lw=0)
        fits = np.flatnonzero(~np.isnan(held))
        if fits[-1] < len(values) - 1:
            axes.plot(values[fits[-1]], held[fits[-1]], "x", color=colour, ms=9, mew=2)
    best = np.array([np.nan if plan is None else plan.step_s for plan in result.plans])
    axes.plot(values, best, color="black", lw=2, marker="o", ms=4, label="best plan")
    axes.set(xscale="log", yscale="log", xlabel=_LABELS[name], ylabel="step (s)", title=title)
    axes.set_xticks(values, [f"{value:g}" for value in values], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(
        fontsize=7, title="shade: where it is best; ×: the last point where it fits", title_fontsize=7
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _label(plan: Plan) -> str:
    shown = {str(item.model_stage): item.text for item in plan.assignments}
    return f"generation {shown['actor.generation']} | training {shown['actor.training']}"
