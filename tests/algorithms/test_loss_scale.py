"""The loss scale: halved at an overflow, doubled after many steps without one, always a power of two."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nereus.algorithms.loss_scale import FIRST, GROWTH_STEPS, LARGEST, LossScale


@given(st.lists(st.sampled_from(["overflow", "step", "many"]), max_size=60))
def test_it_stays_a_power_of_two_between_one_and_the_largest(events: list[str]) -> None:
    scale = LossScale()
    for event in events:
        for _ in range(GROWTH_STEPS if event == "many" else 1):
            scale = scale.overflowed() if event == "overflow" else scale.stepped()
        assert 1 <= scale.value <= LARGEST
        assert math.frexp(scale.value)[0] == 0.5
        assert scale.can_shrink == (scale.value > 1)
        assert 0 <= scale.num_steps < GROWTH_STEPS


def test_it_grows_after_as_many_steps_as_said_in_a_row() -> None:
    scale = LossScale()
    for _ in range(GROWTH_STEPS - 1):
        scale = scale.stepped()
    assert scale.value == FIRST
    assert scale.stepped() == LossScale(2 * FIRST)
    scale = scale.overflowed()
    assert scale == LossScale(FIRST / 2), "the count begins anew"
