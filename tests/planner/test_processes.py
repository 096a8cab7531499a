"""How many processes: enough to hide the work, never more than cores feed, and no to and fro."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.planner.processes import (
    WAIT_SHARE,
    CallsSeen,
    most_processes,
    reward_processes,
    scoring_s,
    tool_processes,
    waiting_s,
)

SEEN = CallsSeen(num_calls=64, call_s=0.5, longest_s=1.0, cpu_share=0.0, window_s=4.0, step_s=10.0)

SEEN_ANY = st.builds(
    CallsSeen,
    num_calls=st.integers(1, 2000).map(float),
    call_s=st.floats(1e-4, 20),
    longest_s=st.floats(1e-4, 60),
    cpu_share=st.floats(0, 1),
    window_s=st.floats(0, 300),
    step_s=st.floats(0.1, 600),
)


def scheduled_s(calls_s: list[float], processes: int) -> float:
    """When calls end that go, in their order, to whichever process is free."""
    ends = [0.0] * processes
    for call_s in calls_s:
        heapq.heapreplace(ends, ends[0] + call_s)
    return max(ends)


@given(calls_s=st.lists(st.floats(0.01, 5), min_size=1, max_size=80), processes=st.integers(1, 20))
def test_scoring_never_takes_longer_than_its_bound(calls_s: list[float], processes: int) -> None:
    seen = replace(SEEN, num_calls=len(calls_s), call_s=sum(calls_s) / len(calls_s), longest_s=max(calls_s))
    assert scheduled_s(calls_s, processes) <= scoring_s(seen, processes) * (1 + 1e-9)


def test_as_many_processes_as_hide_the_scoring() -> None:
    chosen = reward_processes(SEEN, 1, cores=8)
    assert scoring_s(SEEN, 1) == 32.0  # 64 calls of half a second
    assert chosen.number == 18
    assert chosen.then_s == scoring_s(SEEN, 18) <= 0.7 * 4.0 < scoring_s(SEEN, 17)
    assert "too few: scoring ends after 32 s with 1" in chosen.why
    # where nothing runs meanwhile, scoring may take a twentieth of the step, at which more stop to help
    alone = reward_processes(replace(SEEN, window_s=0.0), 1, cores=8)
    assert alone.limit_s == 0.5
    assert scoring_s(SEEN, alone.number) <= 1.05 * scoring_s(SEEN, 64)


def test_calls_that_compute_get_no_more_processes_than_free_cores() -> None:
    assert reward_processes(replace(SEEN, cpu_share=1.0), 1, cores=3).number == 3
    assert reward_processes(replace(SEEN, cpu_share=0.5), 1, cores=3).number == 6
    fewer = reward_processes(replace(SEEN, cpu_share=1.0), 5, cores=3)
    assert fewer.number == 3
    assert "no more than 3 are fed by 3 free cores" in fewer.why
    assert most_processes(replace(SEEN, num_calls=2), cores=100) == 2


@given(seen=SEEN_ANY, now=st.integers(1, 64), cores=st.floats(1, 64))
def test_what_was_chosen_is_kept_while_nothing_changes(seen: CallsSeen, now: int, cores: float) -> None:
    for rule in (reward_processes, tool_processes):
        once = rule(seen, now, cores=cores)
        assert 1 <= once.number <= max(1, most_processes(seen, cores=cores))
        assert rule(seen, once.number, cores=cores).number == once.number


@given(seen=SEEN_ANY, now=st.integers(1, 64), change=st.floats(1.0, 1.4))
def test_calls_that_take_longer_within_the_band_move_nothing(
    seen: CallsSeen, now: int, change: float
) -> None:
    once = reward_processes(seen, now, cores=1e9)
    if once.then_s <= 0.7 * once.limit_s:
        slower = replace(seen, call_s=seen.call_s * change, longest_s=seen.longest_s * change)
        assert reward_processes(slower, once.number, cores=1e9).number == once.number


def test_a_load_that_wavers_by_a_tenth_changes_the_number_once() -> None:
    draw, now, before, numbers = random.Random(0), 1, None, []
    for _ in range(60):
        waver = draw.uniform(0.9, 1.1)
        before = replace(SEEN, call_s=0.5 * waver, longest_s=waver).blended(before)
        now = reward_processes(before, now, cores=64).number
        numbers.append(now)
    assert len(set(numbers)) == 1
    quiet = replace(SEEN, call_s=0.02, longest_s=0.04)
    for _ in range(12):
        before = quiet.blended(before)
        now = reward_processes(before, now, cores=64).number
    assert now == 1


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_waiting_is_that_of_a_simulated_queue(processes: int) -> None:
    seen = replace(SEEN, num_calls=0.7 * processes * 1000, call_s=1.0, window_s=1000.0)
    draw, free, now, waited, num = random.Random(3), [0.0] * processes, 0.0, 0.0, 60_000
    for _ in range(num):
        now += draw.expovariate(0.7 * processes)
        begins = max(now, free[0])
        waited += begins - now
        heapq.heapreplace(free, begins + draw.expovariate(1.0))
    # 60,000 arrivals of an M/M/k queue at load 0.7: the mean's deviation is below a tenth
    assert waiting_s(seen, processes) == pytest.approx(waited / num, rel=0.1)


def test_tools_get_as_many_processes_as_keep_calls_from_waiting() -> None:
    busy = replace(SEEN, num_calls=200, call_s=0.1, window_s=10.0)  # two processes' worth of calls
    chosen = tool_processes(busy, 1, cores=64)
    assert chosen.now_s == float("inf")
    assert waiting_s(busy, chosen.number) <= 0.7 * WAIT_SHARE * 0.1 < waiting_s(busy, chosen.number - 1)
    assert tool_processes(replace(busy, num_calls=2), chosen.number, cores=64).number == 1


def test_calls_that_come_faster_than_cores_serve_them_get_all_cores() -> None:
    flood = replace(SEEN, num_calls=1000, call_s=1.0, window_s=10.0, cpu_share=1.0)
    assert tool_processes(flood, 1, cores=6).number == 6
