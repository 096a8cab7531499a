"""Tracking stays in proportion to the step."""

from __future__ import annotations

import pytest

from nereus.config import Tracking
from nereus.flows.tracking import ALLOWED_SHARE, COST_S, level


@pytest.mark.parametrize("setting", [Tracking.full, Tracking.tasks, Tracking.step])
def test_a_named_level_is_taken_as_it_is(setting: Tracking) -> None:
    assert level(setting, 0.01) == setting


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(60.0, Tracking.full), (10.0, Tracking.tasks), (1.0, Tracking.step), (None, Tracking.tasks)],
)
def test_auto_takes_the_fullest_level_that_costs_under_one_percent(
    step_s: float | None, expected: Tracking
) -> None:
    chosen = level(Tracking.auto, step_s)
    assert chosen == expected
    if step_s is not None and chosen != Tracking.step:
        assert COST_S[chosen] <= ALLOWED_SHARE * step_s
