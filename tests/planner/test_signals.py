"""Drift signals, their history, and what makes a job plan again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config.adaptation import Thresholds
from nereus.planner.lengths import LengthDistribution
from nereus.planner.signals import Drift, Gpu, SignalHistory, Signals, Switch
from nereus.planner.triggers import Cause, Trigger, limits, trigger_of

ALL = frozenset(range(4))


def signals(step: int, mean: float = 500.0, **changes: object) -> Signals:
    """Four GPUs on one node, lengths with this mean."""
    return replace(
        Signals(
            step=step,
            now_s=60.0 * step,
            response=LengthDistribution.from_mean_p95_max(mean, 2 * mean, 4 * mean),
            pool=tuple(Gpu(id=rank, node=0) for rank in range(4)),
        ),
        **changes,  # type: ignore[arg-type]
    )


def fired(
    means: list[float], thresholds: Thresholds | None = None, usable: frozenset[int] = ALL
) -> list[Trigger | None]:
    """The triggers of a job whose lengths have these means; references are reset where one fires."""
    thresholds = thresholds or Thresholds()
    history = SignalHistory.start(signals(0, means[0]), ALL)
    found = []
    for step, mean in enumerate(means):
        now = signals(step, mean)
        history = history.observed(now, limits(thresholds), thresholds.hysteresis)
        trigger = trigger_of(now, history, thresholds, usable=usable, in_use=ALL, fits=True)
        if trigger is not None:
            history = history.with_crossing(trigger.cause, step).with_replan(now, usable)
        found.append(trigger)
    return found


def test_steady_lengths_trigger_nothing() -> None:
    assert fired([500, 600, 560, 420, 500]) == [None] * 5


def test_one_odd_step_triggers_nothing_but_two_do() -> None:
    assert fired([500, 700, 500, 500]) == [None] * 4
    second = fired([500, 700, 700])[2]
    assert second is not None
    assert second.cause is Cause.LENGTH
    assert second.numbers["deviation"] == pytest.approx(0.4, abs=1e-6)
    assert "500" in second.text
    assert "700" in second.text
    assert "30%" in second.text


def test_a_signal_that_fired_rests_until_it_drifts_from_there() -> None:
    causes = fired([500, 700, 700, 700, 700, 750, 950, 950])
    assert [at for at, trigger in enumerate(causes) if trigger is not None] == [2, 7]


def test_hysteresis_counts_a_signal_as_outside_until_it_is_well_inside() -> None:
    # 30 % with 20 % hysteresis: outside beyond 650, inside again below 620.
    assert fired([500, 660, 630])[2] is not None
    assert fired([500, 660, 610, 660])[2:] == [None, None]


@settings(deadline=None)
@given(st.lists(st.floats(0.78, 1.28), min_size=2, max_size=12))
def test_drift_within_the_threshold_never_fires(factors: list[float]) -> None:
    assert fired([500.0, *(500.0 * factor for factor in factors)])[1:] == [None] * len(factors)


def test_efficiency_and_memory_have_thresholds_of_their_own() -> None:
    thresholds = Thresholds(efficiency=0.1, memory=0.5, steps=1)
    start = signals(0, efficiency={"training": 1.0}, peak_memory_bytes={0: 100, 1: 90})
    history = SignalHistory.start(start, ALL)
    slow = signals(1, efficiency={"training": 0.85}, peak_memory_bytes={0: 140, 1: 90})
    history = history.observed(slow, limits(thresholds), thresholds.hysteresis)
    trigger = trigger_of(slow, history, thresholds, usable=ALL, in_use=ALL, fits=True)
    assert trigger is not None
    assert trigger.cause is Cause.EFFICIENCY
    full = signals(1, efficiency={"training": 1.0}, peak_memory_bytes={0: 160})
    history = SignalHistory.start(start, ALL).observed(full, limits(thresholds), 0.2)
    trigger = trigger_of(full, history, thresholds, usable=ALL, in_use=ALL, fits=True)
    assert trigger is not None
    assert trigger.cause is Cause.MEMORY


def test_lost_gpus_come_before_memory_and_memory_before_the_pool() -> None:
    now = signals(1)
    history = SignalHistory.start(signals(0), ALL).observed(now, limits(Thresholds()), 0.2)

    def cause(usable: frozenset[int], in_use: frozenset[int], fits: bool) -> Cause | None:
        trigger = trigger_of(now, history, Thresholds(), usable=usable, in_use=in_use, fits=fits)
        return None if trigger is None else trigger.cause

    few = frozenset({0, 1, 2})
    assert cause(few, ALL, False) is Cause.LOST
    assert cause(few, few, False) is Cause.VIOLATION
    assert cause(few, few, True) is Cause.POOL
    assert cause(ALL, few, True) is None
    assert Cause.LOST.forces
    assert Cause.VIOLATION.forces
    assert not Cause.POOL.forces


def test_a_drain_deadline_makes_a_gpu_unusable_in_time() -> None:
    pool = (Gpu(id=0, node=0), Gpu(id=1, node=0, drain_s=100.0))
    now = signals(0, pool=pool, arrivals_s=(400.0,))
    assert [gpu.id for gpu in now.staying(99.0)] == [0, 1]
    assert [gpu.id for gpu in now.staying(100.0)] == [0]
    assert now.next_change_s(0.0) == 100.0
    assert now.next_change_s(100.0) == 400.0
    assert now.next_change_s(500.0) is None


def test_history_is_a_value_that_remembers_crossings_switches_and_waiting() -> None:
    history = SignalHistory.start(signals(0), ALL)
    later = history.with_crossing("length", 3).with_crossing("length", 10).with_crossing("pool", 11)
    assert later.intervals("length") == (7,)
    assert later.intervals("pool") == ()
    assert history.crossings == {}
    waited = later.waiting("length", 11, 2.0).waiting("length", 12, 3.0)
    assert (waited.waiting_for, waited.waiting_since, waited.waited_s) == ("length", 11, 5.0)
    moved = waited.with_transition(Switch(step=13, predicted_s=1.0, measured_s=1.2))
    assert moved.waiting_for is None
    assert moved.waited_s == 0.0
    assert len(moved.switches) == 1


def test_a_signal_without_reference_takes_its_first_value_as_one() -> None:
    history = SignalHistory.start(signals(0), ALL)
    now = signals(1, peak_memory_bytes={0: 100})
    history = history.observed(now, limits(Thresholds()), 0.2)
    assert history.references[Drift.MEMORY] == {"peak": 100.0}
    assert history.outside[Drift.MEMORY] == 0
