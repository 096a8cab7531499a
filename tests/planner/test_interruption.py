"""Where a step stops when a node leaves in its middle, and how much of it is done again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.planner.interruption import Interruption, Surprise, interruption

STAGES = (0.5, 0.1, 0.4)


def stop(
    told: float, gone: float, *, num_done: int = 0, clock: float = 0.0, margin: float = 0.0
) -> Interruption:
    surprise = Surprise(node=0, told=told, gone=gone)
    return interruption(STAGES, surprise, num_done=num_done, clock=clock, margin=margin)


def test_an_announced_node_is_left_at_the_last_boundary_before_it_goes() -> None:
    assert stop(0.2, 0.9) == Interruption(num_done=2, at=pytest.approx(0.6), lost=0.0)
    assert stop(0.2, 0.55) == Interruption(num_done=1, at=0.5, lost=0.0)


def test_a_node_without_notice_costs_what_the_stage_under_way_had_done() -> None:
    assert stop(0.3, 0.3) == Interruption(num_done=0, at=0.3, lost=pytest.approx(0.3))
    assert stop(0.7, 0.7) == Interruption(num_done=2, at=0.7, lost=pytest.approx(0.1))


def test_a_boundary_too_close_to_the_deadline_is_not_used() -> None:
    assert stop(0.2, 0.62, margin=0.05) == Interruption(num_done=1, at=0.5, lost=0.0)
    assert stop(0.55, 0.62, margin=0.05) == Interruption(num_done=2, at=0.62, lost=pytest.approx(0.02))


def test_what_was_lost_before_is_not_lost_again() -> None:
    assert stop(0.8, 0.8, num_done=2, clock=0.7).lost == pytest.approx(0.1)


@given(told=st.floats(0, 1), length=st.floats(0, 1), margin=st.floats(0, 0.2), num_done=st.integers(0, 2))
def test_no_stage_is_done_twice_and_no_more_is_lost_than_one(
    told: float, length: float, margin: float, num_done: int
) -> None:
    clock = (0.0, 0.5, 0.6)[num_done]
    found = stop(told, told + length, num_done=num_done, clock=clock, margin=margin)
    assert num_done <= found.num_done < len(STAGES)
    assert found.lost >= 0
    if found.lost and told + length <= 1:
        assert found.lost <= STAGES[found.num_done] + 1e-9
