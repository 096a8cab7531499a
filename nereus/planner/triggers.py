"""What makes a job plan again: a changed pool or a memory violation at once, drift beyond its threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nereus.config.adaptation import Thresholds
from nereus.planner.signals import Drift, GpuId, SignalHistory, Signals, deviations


class Cause(StrEnum):
    """Why to plan again. `LOST` and `VIOLATION` force a change: the plan in force cannot go on."""

    LOST = "GPUs lost"
    VIOLATION = "memory violation"
    POOL = "pool"
    LENGTH = "length"
    EFFICIENCY = "efficiency"
    MEMORY = "memory"
    SCHEDULE = "schedule"

    @property
    def forces(self) -> bool:
        """Whether the profit of the change is beside the point."""
        return self in (Cause.LOST, Cause.VIOLATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A cause, in words for people and with its numbers."""

    cause: Cause
    text: str
    numbers: Mapping[str, float]


def limits(thresholds: Thresholds) -> dict[Drift, float]:
    """The relative threshold of every signal."""
    return {
        Drift.LENGTH: thresholds.length,
        Drift.EFFICIENCY: thresholds.efficiency,
        Drift.MEMORY: thresholds.memory,
    }


def trigger_of(
    signals: Signals,
    history: SignalHistory,
    thresholds: Thresholds,
    *,
    usable: frozenset[GpuId],
    in_use: frozenset[GpuId],
    fits: bool,
) -> Trigger | None:
    """The most urgent cause before this step, or None.

    `usable` are the GPUs that last until the step is over, `in_use` those of the plan in force; `fits` says
    whether its layouts fit the memory with the lengths of now and some headroom. `history` has observed
    `signals`.
    """
    if gone := in_use - usable:
        names = ", ".join(map(str, sorted(gone)[:8])) + (" ..." if len(gone) > 8 else "")
        text = f"{len(gone)} of the plan's {len(in_use)} GPUs leave or left ({names})"
        return Trigger(cause=Cause.LOST, text=text, numbers={"lost": len(gone), "in_use": len(in_use)})
    if not fits:
        text = (
            f"responses {thresholds.headroom:.0%} longer than the last would not fit the memory with these "
            "layouts, however small the micro-batch"
        )
        return Trigger(cause=Cause.VIOLATION, text=text, numbers={"headroom": thresholds.headroom})
    if usable != history.usable:
        joined, left = len(usable - history.usable), len(history.usable - usable)
        text = f"{joined} GPUs joined, {left} left; {len(usable)} are usable"
        return Trigger(
            cause=Cause.POOL, text=text, numbers={"joined": joined, "left": left, "usable": len(usable)}
        )
    return _drift(signals, history, thresholds)


def _drift(signals: Signals, history: SignalHistory, thresholds: Thresholds) -> Trigger | None:
    bounds = limits(thresholds)
    for drift in Drift:
        if history.outside.get(drift, 0) < thresholds.steps:
            continue
        values, references = signals.drift_values[drift], history.references[drift]
        far = deviations(values, references)
        part = max(far, key=lambda each: round(far[each], 9))  # the first of those that rounding tells apart
        return Trigger(
            cause=Cause(drift.value),
            text=(
                f"{drift} ({part}) went from {references[part]:.4g} to {values[part]:.4g} since step "
                f"{history.planned_at}, beyond {bounds[drift]:.0%}"
            ),
            numbers={
                "value": values[part],
                "reference": references[part],
                "deviation": values[part] / references[part] - 1,
                "threshold": bounds[drift],
            },
        )
    return None
