"""One global order, whatever the number of units and wherever the job was resumed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.data.order import Cursor, PromptOrder, deal

ORDERS = st.builds(
    PromptOrder, num_prompts=st.integers(1, 40), seed=st.integers(-(2**63), 2**64), shuffle=st.booleans()
)


def run(order: PromptOrder, steps: list[int], cursor: Cursor | None = None) -> tuple[list[int], Cursor]:
    taken: list[int] = []
    cursor = cursor or Cursor()
    for num_prompts in steps:
        ids, cursor = order.take(cursor, num_prompts)
        taken += ids
    return taken, cursor


@given(order=ORDERS, epochs=st.integers(1, 4))
def test_each_epoch_holds_every_prompt_once(order: PromptOrder, epochs: int) -> None:
    taken, cursor = run(order, [order.num_prompts] * epochs)
    assert sorted(taken) == list(range(epochs * order.num_prompts))
    assert cursor == Cursor(epoch=epochs, position=0)


@given(order=ORDERS, steps=st.lists(st.integers(0, 50), max_size=8))
def test_the_order_does_not_depend_on_how_it_is_taken(order: PromptOrder, steps: list[int]) -> None:
    in_steps, cursor_in_steps = run(order, steps)
    at_once, cursor_at_once = run(order, [sum(steps)])
    assert in_steps == at_once
    assert cursor_in_steps == cursor_at_once
    assert len(set(in_steps)) == len(in_steps)


@given(order=ORDERS, before=st.integers(0, 90), after=st.integers(0, 90))
def test_resuming_continues_where_it_stopped(order: PromptOrder, before: int, after: int) -> None:
    first, cursor = run(order, [before])
    saved = (cursor.epoch, cursor.position)
    rest, _ = run(order, [after], Cursor(epoch=saved[0], position=saved[1]))
    assert first + rest == run(order, [before + after])[0]


@given(order=ORDERS, epoch=st.integers(0, 5))
def test_resuming_at_an_epochs_end_trains_the_next_epoch_in_full(order: PromptOrder, epoch: int) -> None:
    at_end = order.take(Cursor(epoch=epoch, position=order.num_prompts), order.num_prompts)
    at_start = order.take(Cursor(epoch=epoch + 1, position=0), order.num_prompts)
    assert at_end == at_start
    first = (epoch + 1) * order.num_prompts
    assert sorted(at_end[0]) == list(range(first, first + order.num_prompts))
    assert at_end[1] == Cursor(epoch=epoch + 2, position=0)


@settings(max_examples=60)
@given(order=ORDERS, batch=st.integers(1, 17), units=st.lists(st.integers(1, 6), min_size=1, max_size=9))
def test_any_change_of_dp_keeps_the_global_order(order: PromptOrder, batch: int, units: list[int]) -> None:
    cursor = Cursor()
    seen: list[int] = []
    for num_units in units:  # a checkpoint and a new number of units before every step
        cursor = Cursor(epoch=cursor.epoch, position=cursor.position)
        ids, cursor = order.take(cursor, batch)
        shares = deal(ids, num_units)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        seen += [sample_id for share in shares for sample_id in share]
    assert seen == run(order, [batch] * len(units))[0]


def test_dp_4_to_2_to_3_loses_no_prompt_and_uses_none_twice() -> None:
    order, cursor, seen = PromptOrder(num_prompts=24, seed=7), Cursor(), []
    for num_units in (4, 2, 3):
        ids, cursor = order.take(cursor, 8)
        seen += [sample_id for share in deal(ids, num_units) for sample_id in share]
    assert seen == order.epoch(0).tolist()
    assert sorted(seen) == list(range(24))


def test_epochs_and_seeds_are_shuffled_differently_and_always_alike() -> None:
    order = PromptOrder(num_prompts=50, seed=1)
    assert order.epoch(0).tolist() != order.epoch(1).tolist()
    assert order.epoch(0).tolist() != PromptOrder(num_prompts=50, seed=2).epoch(0).tolist()
    # The stream is part of the checkpoint format: these numbers may never change.
    assert PromptOrder(num_prompts=8, seed=0).epoch(0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_without_shuffling_the_source_order_is_kept() -> None:
    assert PromptOrder(num_prompts=4, seed=9, shuffle=False).take(Cursor(), 6)[0] == (0, 1, 2, 3, 4, 5)


def test_fewer_items_than_units_leaves_empty_shares() -> None:
    assert sorted(deal("ab", 4)) == [(), (), ("a",), ("b",)]


def test_a_cursor_outside_the_order_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie"):
        PromptOrder(num_prompts=3, seed=0).take(Cursor(epoch=0, position=4), 1)
