"""Cuts: every logical element lies in exactly the right positions' boxes, and stored shapes hold them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nereus.emu.tensor import (
    Box,
    Cut,
    Even,
    KvHeads,
    Replicated,
    Vocab,
    box_shape,
    box_size,
    intersect,
    whole,
)


def holders(cut: Cut, shape: tuple[int, ...], tp: int) -> NDArray[np.bool_]:
    """[tp, *shape]: which positions hold each element."""
    out = np.zeros((tp, *shape), dtype=bool)
    for position in range(tp):
        out[position][tuple(slice(lo, hi) for lo, hi in cut.box(shape, tp, position))] = True
    return out


def rows_held(cut: Cut, size: int, tp: int) -> list[list[int]]:
    """The rows of a tensor [size, 3] by position; every one must be held in full width."""
    held = holders(cut, (size, 3), tp)
    assert (held.all(axis=2) == held.any(axis=2)).all()
    return [np.flatnonzero(held[position].all(axis=1)).tolist() for position in range(tp)]


@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=3), tp=st.integers(1, 8))
def test_replicated_is_held_by_all(shape: list[int], tp: int) -> None:
    assert holders(Replicated(), tuple(shape), tp).all()


@given(num=st.integers(0, 40), multiple=st.integers(1, 4), tp=st.integers(1, 9))
def test_balanced_parts_are_those_of_array_split(num: int, multiple: int, tp: int) -> None:
    want = [
        part.ravel().tolist() for part in np.array_split(np.arange(num * multiple).reshape(num, multiple), tp)
    ]
    assert rows_held(Even(dim=0, multiple=multiple), num * multiple, tp) == want


@given(num=st.integers(1, 40), tp=st.integers(1, 9))
def test_chunk_rule_gives_full_parts_first_and_then_nothing(num: int, tp: int) -> None:
    width = -(-num // tp)
    parts = [list(range(num))[i : i + width] for i in range(0, num, width)]
    want = parts + [[] for _ in range(tp - len(parts))]
    assert rows_held(Even(dim=0, rule="chunk"), num, tp) == want


def test_six_over_four_by_the_chunk_rule_leaves_the_last_position_empty() -> None:
    cut = Even(dim=0, rule="chunk")
    assert [box_shape(cut.box((6,), 4, position)) for position in range(4)] == [(2,), (2,), (2,), (0,)]
    assert cut.stored_shape((6,), 4, 3) == (0,)
    assert box_size(cut.box((6,), 4, 3)) == 0


def test_a_dimension_that_is_no_whole_number_of_multiples_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a whole number"):
        Even(dim=0, multiple=4).box((6,), 2, 0)


@given(dim=st.integers(0, 2), tp=st.integers(1, 6))
def test_a_cut_touches_only_its_dimension(dim: int, tp: int) -> None:
    shape = (6, 7, 8)
    for position in range(tp):
        box = Even(dim=dim).box(shape, tp, position)
        assert all(box[other] == (0, shape[other]) for other in range(3) if other != dim)


@given(kv=st.integers(1, 8), rows=st.integers(1, 4), tp=st.integers(1, 8))
def test_kv_heads_up_to_their_number_are_spread_whole(kv: int, rows: int, tp: int) -> None:
    if tp > kv:
        return
    heads = np.array_split(np.arange(kv * rows).reshape(kv, rows), tp)
    assert rows_held(KvHeads(dim=0, num_kv_heads=kv, rows_per_head=rows), kv * rows, tp) == [
        part.ravel().tolist() for part in heads
    ]


@given(kv=st.integers(1, 4), copies=st.integers(2, 4), rows=st.integers(1, 4))
def test_kv_heads_beyond_their_number_are_replicated(kv: int, copies: int, rows: int) -> None:
    tp = kv * copies
    for position, held in enumerate(
        rows_held(KvHeads(dim=0, num_kv_heads=kv, rows_per_head=rows), kv * rows, tp)
    ):
        head = position * kv // tp
        assert held == list(range(head * rows, (head + 1) * rows))


@given(kv=st.integers(1, 4), copies=st.integers(1, 4), per_copy=st.integers(1, 3), width=st.integers(1, 3))
def test_queries_follow_the_kv_head_of_their_position(
    kv: int, copies: int, per_copy: int, width: int
) -> None:
    """Each query row lies at exactly one position, and that position holds the row's key head."""
    tp, group = kv * copies, copies * per_copy
    query = KvHeads(dim=0, num_kv_heads=kv, rows_per_head=group * width, split_group=max(group, 2))
    key = KvHeads(dim=0, num_kv_heads=kv, rows_per_head=width)
    queries = rows_held(query, kv * group * width, tp)
    assert sorted(row for rows in queries for row in rows) == list(range(kv * group * width))
    for position, rows in enumerate(queries):
        lo, hi = key.interval(tp, position)
        assert all(lo // width <= row // (group * width) < hi // width for row in rows)


@given(size=st.integers(1, 70), multiple=st.integers(1, 8), tp=st.integers(1, 8))
def test_vocabulary_rows_lie_at_one_position_and_padding_fills_equal_parts(
    size: int, multiple: int, tp: int
) -> None:
    cut = Vocab(dim=0, multiple=multiple)
    held = rows_held(cut, size, tp)
    assert [row for rows in held for row in rows] == list(range(size))
    stored = {cut.stored_shape((size, 3), tp, position) for position in range(tp)}
    assert len(stored) == 1
    (rows, width) = stored.pop()
    assert width == 3
    assert rows % multiple == 0
    assert rows == cut.stored_rows(size, tp)
    padded = rows * tp
    assert size <= padded < size + multiple * tp
    assert all(len(each) <= rows for each in held)


boxes = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair))),
    min_size=2,
    max_size=2,
).map(tuple)


@given(a=boxes, b=boxes)
def test_intersection_holds_exactly_the_common_elements(a: Box, b: Box) -> None:
    def elements(box: Box) -> set[tuple[int, int]]:
        (y0, y1), (x0, x1) = box
        return {(y, x) for y in range(y0, y1) for x in range(x0, x1)}

    common = intersect(a, b)
    assert elements(common) == elements(a) & elements(b)
    assert box_size(common) == len(elements(common))


def test_whole_box_of_a_shape() -> None:
    assert whole((3, 4)) == ((0, 3), (0, 4))
    assert box_size(whole(())) == 1
