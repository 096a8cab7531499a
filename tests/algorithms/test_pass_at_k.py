"""pass@k against its definition and against all ways to draw."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.algorithms.pass_at_k import pass_at_k


@given(st.data())
def test_it_is_the_share_of_draws_with_a_pass(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    # Both are quotients of the same small integers; one rounding apart at most.
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


@given(st.integers(1, 200), st.data())
def test_it_equals_the_product_form_of_the_paper(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    product = 1.0
    if n - c < k:
        product = 0.0
    else:
        for i in range(n - c + 1, n + 1):
            product *= 1.0 - k / i
    assert pass_at_k(n, c, k) == pytest.approx(1.0 - product, abs=1e-12)  # 200 roundings of the product


def test_known_values() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 1, 5) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_what_cannot_be_drawn_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot draw"):
        pass_at_k(n, c, k)
