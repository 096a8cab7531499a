"""Tracking stays in proportion to the step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from nereus.config import Tracking
from nereus.flows.tracking import ALLOWED_SHARE, COST_S, TaskRuns, level, steps_a_run


@pytest.mark.parametrize("setting", [Tracking.full, Tracking.tasks, Tracking.step])
def test_a_named_level_is_taken_as_it_is(setting: Tracking) -> None:
    assert level(setting, 0.01) == setting


@pytest.mark.parametrize("fullest", list(COST_S))
def test_auto_takes_the_fullest_level_that_costs_under_one_percent(fullest: Tracking) -> None:
    step_s = COST_S[fullest] / ALLOWED_SHARE
    assert level(Tracking.auto, 1.01 * step_s) == fullest
    less = level(Tracking.auto, 0.99 * step_s)
    if fullest == Tracking.step:
        assert less == Tracking.step, "there is no less"
    else:
        assert COST_S[less] < COST_S[fullest]


def test_auto_shows_task_runs_until_a_step_was_measured() -> None:
    assert level(Tracking.auto, None) == Tracking.tasks


@given(step_s=st.floats(1e-3, 1e3))
def test_short_steps_share_a_task_run_so_that_auto_costs_under_one_percent(step_s: float) -> None:
    num = steps_a_run(Tracking.auto, step_s)
    assert COST_S[Tracking.step] <= ALLOWED_SHARE * step_s * num * (1 + 1e-9)
    assert num == 1 or COST_S[Tracking.step] > ALLOWED_SHARE * step_s * (num - 1)
    assert steps_a_run(Tracking.step, step_s) == 1, "who names a level gets it"


class Looked:
    """Its class is asked for by whoever walks through what holds it."""

    def __init__(self) -> None:
        self.times = 0

    def __getattribute__(self, name: str) -> object:
        if name == "__class__":
            self.times += 1
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Watched:
    """Notes whether somebody looks into it."""

    inner: Looked


@task(cache_policy=NO_CACHE)
def same(value: Watched, expected: int) -> bool:
    return id(value) == expected


@pytest.mark.usefixtures("server")
def test_a_stage_gets_its_arguments_as_they_are_and_prefect_does_not_look_into_them() -> None:
    looked = Looked()
    value = Watched(inner=looked)

    @flow
    def run() -> bool:
        return TaskRuns().start(same, value, expected=id(value)).result()

    assert run()
    assert looked.times == 0
