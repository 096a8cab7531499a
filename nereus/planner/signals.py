"""The drift signals of a job: what one step showed, and what all steps so far amount to.

```
step k ─▶ Signals ─▶ SignalHistory.observed ─▶ Trigger (triggers.py) ─▶ planning ─▶ with_replan (resets)
                                  ▲                                                      │
                                  └────────── with_transition (measured seconds) ◀───────┘
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.lengths import LengthDistribution

GpuId = int


class Drift(StrEnum):
    """The signals that drift: they are compared with their values at the last planning."""

    LENGTH = "length"
    EFFICIENCY = "efficiency"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Gpu:
    """A GPU of the pool. `drain_s` is when it goes away, on the clock of `Signals.now_s`; None: unknown."""

    id: GpuId
    node: int
    drain_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What is known at the safe boundary before `step`. A value; the sizes of all mappings are the GPUs' or
    stages'.

    `response` are the lengths of the last step; `peak_memory_bytes` is by GPU id; `stage_s` are measured
    seconds by stage, `efficiency` what the cost model, not calibrated, predicts for a stage over what was
    measured (1: as predicted, falls when the machine slows). `calibration` is what was learned from such
    times; plans are made with it. `arrivals_s` are announced times at which GPUs will join, or some will have
    to go. All times are seconds on one clock.
    """

    step: int
    now_s: float
    response: LengthDistribution
    pool: tuple[Gpu, ...]
    peak_memory_bytes: Mapping[GpuId, int] = field(default_factory=dict)
    stage_s: Mapping[str, float] = field(default_factory=dict)
    efficiency: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration = NEUTRAL
    arrivals_s: tuple[float, ...] = ()

    @property
    def drift_values(self) -> Mapping[Drift, Mapping[str, float]]:
        """The values that are watched, by signal and part."""
        memory = max(self.peak_memory_bytes.values(), default=0)
        return {
            Drift.LENGTH: {"mean": self.response.mean, "p95": self.response.quantile(0.95)},
            Drift.EFFICIENCY: dict(self.efficiency),
            Drift.MEMORY: {"peak": float(memory)} if memory else {},
        }

    @property
    def ids(self) -> frozenset[GpuId]:
        """All GPUs of the pool."""
        return frozenset(gpu.id for gpu in self.pool)

    def staying(self, until_s: float) -> tuple[Gpu, ...]:
        """GPUs that are not known to leave before `until_s`."""
        return tuple(gpu for gpu in self.pool if gpu.drain_s is None or gpu.drain_s > until_s)

    def next_change_s(self, after_s: float) -> float | None:
        """When the pool is next known to change, after that time."""
        known = [gpu.drain_s for gpu in self.pool if gpu.drain_s is not None]
        return min((at for at in (*known, *self.arrivals_s) if at > after_s), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One finished transition: predicted and measured seconds."""

    step: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuddenLoss:
    """So many GPUs in use were gone at a step without a warning."""

    step: int
    num_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalHistory:
    """All that decisions may look back on, since `started_at`.

    `references` are the drift signals at the last planning; `outside` counts the steps that a signal has been
    beyond its threshold (0: inside). `crossings` are the steps at which a cause fired, by its name;
    `losses` are those of GPUs without a warning, `switches` the transitions done. `trend` is the direction of
    the lengths, 1 up and -1 down, since they last drifted by a third of their threshold. `waiting_for` is the
    cause of a change that was refused though it is better, `waiting_since` the step of the first refusal, and
    `waited_s` the seconds that staying has cost since.
    """

    references: Mapping[Drift, Mapping[str, float]] = field(default_factory=dict)
    outside: Mapping[Drift, int] = field(default_factory=dict)
    usable: frozenset[GpuId] = frozenset()
    crossings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    switches: tuple[Switch, ...] = ()
    losses: tuple[SuddenLoss, ...] = ()
    started_at: int = 0
    planned_at: int = 0
    trend: int = 0
    waiting_for: str | None = None
    waiting_since: int | None = None
    waited_s: float = 0.0

    @classmethod
    def start(cls, signals: Signals, usable: frozenset[GpuId]) -> SignalHistory:
        """The history at the first plan."""
        step = signals.step
        return cls(references=signals.drift_values, usable=usable, started_at=step, planned_at=step)

    def after(self, earlier: SignalHistory) -> SignalHistory:
        """The same with what had been seen before the job came to a stop."""
        return replace(
            self,
            crossings=earlier.crossings,
            switches=earlier.switches,
            losses=earlier.losses,
            started_at=earlier.started_at,
        )

    def observed(
        self, signals: Signals, thresholds: Mapping[Drift, float], hysteresis: float
    ) -> SignalHistory:
        """After one more step: how long each signal has been outside its threshold.

        A signal goes outside beyond the threshold and comes back inside only below (1 - hysteresis) of it. A
        part that had no reference takes its first value as one.
        """
        values = signals.drift_values
        references = {drift: {**values[drift], **self.references.get(drift, {})} for drift in Drift}
        outside = {}
        for drift in Drift:
            steps = self.outside.get(drift, 0)
            limit = thresholds[drift] * (1 - hysteresis if steps else 1)
            beyond = max(deviations(values[drift], references[drift]).values(), default=0.0) > limit
            outside[drift] = steps + 1 if beyond else 0
        change = values[Drift.LENGTH]["mean"] / references[Drift.LENGTH]["mean"] - 1
        moved = abs(change) > thresholds[Drift.LENGTH] / 3
        trend = self.trend if not moved else 1 if change > 0 else -1
        return replace(self, references=references, outside=outside, trend=trend)

    def outlook(self, threshold: float) -> tuple[float, ...]:
        """Factors on the lengths of now, from now until the threshold is crossed again along the trend."""
        ways = {0: (1.0,), 1: (1.0, 1 + threshold / 2, 1 + threshold)}
        return ways[abs(self.trend)] if self.trend >= 0 else tuple(1 / factor for factor in ways[1])

    def with_crossing(self, name: str, step: int) -> SignalHistory:
        """A cause of this name fired before this step."""
        known = self.crossings.get(name, ())
        return replace(self, crossings={**self.crossings, name: (*known, step)})

    def with_loss(self, step: int, num_gpus: int = 1) -> SignalHistory:
        """So many GPUs in use were gone at this step without a warning."""
        return replace(self, losses=(*self.losses, SuddenLoss(step=step, num_gpus=num_gpus)))

    @property
    def bursts(self) -> tuple[tuple[int, float], ...]:
        """How large sudden losses were: numbers of GPUs with their shares of all; one where none was."""
        counts = Counter([loss.num_gpus for loss in self.losses] or [1])
        return tuple((size, count / counts.total()) for size, count in sorted(counts.items()))

    def loss_rate(self, step: int) -> float:
        """Sudden losses a step so far."""
        return len(self.losses) / max(step - self.started_at, 1)

    def with_replan(self, signals: Signals, usable: frozenset[GpuId]) -> SignalHistory:
        """After a planning: the signals of now are the references from here on."""
        return replace(
            self, references=signals.drift_values, outside={}, usable=usable, planned_at=signals.step
        )

    def with_transition(self, switch: Switch) -> SignalHistory:
        """After a transition that was done; nothing waits any more."""
        return replace(self.settled(), switches=(*self.switches, switch))

    def waiting(self, cause: str, step: int, gain_s: float) -> SignalHistory:
        """After a refusal: the step that follows costs `gain_s` more than it had to."""
        since = step if self.waiting_since is None else self.waiting_since
        waited_s = self.waited_s + gain_s
        return replace(self, waiting_for=cause, waiting_since=since, waited_s=waited_s)

    def settled(self) -> SignalHistory:
        """With nothing better that waits."""
        return replace(self, waiting_for=None, waiting_since=None, waited_s=0.0)

    def intervals(self, name: str) -> tuple[int, ...]:
        """Steps between successive crossings of a cause."""
        steps = self.crossings.get(name, ())
        return tuple(later - sooner for sooner, later in pairwise(steps))


def deviations(values: Mapping[str, float], references: Mapping[str, float]) -> dict[str, float]:
    """|value / reference - 1| of every part that has a positive reference."""
    return {
        name: abs(value / references[name] - 1)
        for name, value in values.items()
        if references.get(name, 0.0) > 0
    }
