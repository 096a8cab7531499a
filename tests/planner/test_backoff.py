"""How long a plan is left out after aborted transitions."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nereus.planner.backoff import BackOff, after_abort


def aborts(num: int, *, longest: int = 8) -> list[BackOff]:
    """A plan that is aborted every time it is tried, from step 0 on."""
    out: list[BackOff] = []
    for _ in range(num):
        step = out[-1].retry_step if out else 0
        out.append(after_abort(out[-1] if out else None, "plan", "pool", step=step, longest=longest))
    return out


def test_one_two_four_boundaries_are_left_out_up_to_the_longest_wait() -> None:
    tried = [0, *(each.retry_step for each in aborts(6))]
    assert [later - sooner - 1 for sooner, later in pairwise(tried)] == [1, 2, 4, 8, 8, 8]


def test_without_a_wait_the_next_boundary_tries_again() -> None:
    assert [each.retry_step for each in aborts(3, longest=0)] == [1, 2, 3]


def test_another_plan_or_another_pool_is_tried_at_once_and_counted_anew() -> None:
    held = aborts(3)[-1]
    assert held.holds_back("plan", "pool", held.retry_step - 1)
    assert not held.holds_back("plan", "pool", held.retry_step)
    assert not held.holds_back("other plan", "pool", 0)
    assert not held.holds_back("plan", "other pool", 0)
    assert after_abort(held, "plan", "other pool", step=20, longest=8).num_aborts == 1


@given(st.integers(1, 12), st.integers(0, 20))
def test_a_plan_is_always_tried_again(num: int, longest: int) -> None:
    for step, each in zip(
        [0, *(e.retry_step for e in aborts(num, longest=longest))], aborts(num, longest=longest), strict=False
    ):
        assert step < each.retry_step <= step + 1 + longest
