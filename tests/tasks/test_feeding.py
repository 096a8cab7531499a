"""Rows are bound to a unit when they can begin there, each once, the longest first where that is known."""

from __future__ import annotations

import heapq
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.checkpoint.control import Control
from nereus.tasks.feeding import Pool
from nereus.tasks.length_history import LengthHistory
from nereus.tasks.turning import in_turning_order
from tests.emu.engines.generate_cases import make_prompts

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def run(
    lengths: list[int], order: list[int], num_units: int, slots: int
) -> tuple[list[list[int]], list[int]]:
    """Units whose slots each work at one token a tick; the rows of each, and when it ends."""
    pool = Pool(order, num_units, slots)
    ends = [0] * num_units
    events = [(lengths[row], unit) for unit in range(num_units) for row in pool.given(unit)]
    heapq.heapify(events)
    while events:
        now, unit = heapq.heappop(events)
        ends[unit] = now
        for row in pool.take(unit, 1):
            heapq.heappush(events, (now + lengths[row], unit))
    return [pool.given(unit) for unit in range(num_units)], ends


@given(lengths=LENGTHS, num_units=st.integers(1, 5), slots=st.integers(1, 6))
def test_every_row_is_given_once_and_no_unit_holds_more_than_its_slots(
    lengths: list[int], num_units: int, slots: int
) -> None:
    order = list(range(len(lengths)))
    given_rows, _ = run(lengths, order, num_units, slots)
    assert sorted(row for rows in given_rows for row in rows) == order
    pool = Pool(order, num_units, slots)
    assert all(len(pool.given(unit)) <= slots for unit in range(num_units))
    assert pool.has_more == (len(lengths) > slots * num_units)
    assert all(pool.take(unit, 0) == [] for unit in range(num_units) if len(pool.given(unit)) == slots)


@given(lengths=LENGTHS, num_units=st.integers(1, 5), slots=st.integers(1, 6))
def test_no_unit_ends_later_than_the_others_by_more_than_a_row(
    lengths: list[int], num_units: int, slots: int
) -> None:
    _, ends = run(lengths, list(range(len(lengths))), num_units, slots)
    if len(lengths) >= num_units * slots:  # a slot is free only when nobody waits
        assert max(ends) - min(ends) <= max(lengths)


@given(lengths=LENGTHS, num_units=st.integers(1, 5))
def test_without_slots_all_rows_are_given_at_once(lengths: list[int], num_units: int) -> None:
    pool = Pool(list(range(len(lengths))), num_units, None)
    assert not pool.has_more
    counts = [len(pool.given(unit)) for unit in range(num_units)]
    assert sum(counts) == len(lengths)
    assert max(counts) - min(counts) <= 1


def test_units_end_sooner_when_the_longest_begin_first() -> None:
    draw = random.Random(0)
    gains = []
    for _ in range(50):
        lengths = [min(1000, int(draw.lognormvariate(4, 1)) + 1) for _ in range(128)]
        longest_first = sorted(range(128), key=lambda row: -lengths[row])
        as_they_come = max(run(lengths, list(range(128)), 4, 8)[1])
        gains.append(as_they_come / max(run(lengths, longest_first, 4, 8)[1]))
    assert sum(gains) / len(gains) > 1.1


@given(st.lists(st.integers(1, 100), min_size=2, max_size=40), st.integers(1, 5))
def test_turning_order_gives_close_sums_of_what_comes_longest_first(lengths: list[int], num: int) -> None:
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sums = [sum(lengths[row] for row in part) for part in in_turning_order(order, num)]
    assert max(sums) - min(sums) <= max(lengths)


def test_prompts_that_were_long_begin_first_and_unknown_ones_in_the_middle() -> None:
    history = LengthHistory()
    prompts = make_prompts([[1], [1], [2, 5], [2, 5], [3], [3]])
    assert history.longest_first(prompts) == [0, 1, 2, 3, 4, 5]
    history.add(prompts.select([0, 1, 2, 3]), torch.tensor([10, 20, 90, 110]))
    assert history.longest_first(prompts) == [2, 3, 4, 5, 0, 1]
    history.add(prompts.select([0, 1]), torch.tensor([400, 400]))  # the newest pass counts half
    assert history.longest_first(prompts) == [0, 1, 4, 5, 2, 3]


def test_a_history_that_went_through_a_checkpoint_gives_the_same_order() -> None:
    history = LengthHistory()
    prompts = make_prompts([[1], [2, 5], [2, 6], [3]])
    history.add(prompts, torch.tensor([10, 90, 40, 70]))
    control = Control(
        step=1,
        policy_version=1,
        epoch=0,
        position=0,
        seed=0,
        config_digest="",
        prompt_lengths=history.means,
    )
    restored = LengthHistory.of(Control.from_json(control.to_json()).prompt_lengths)
    assert restored.longest_first(prompts) == history.longest_first(prompts) == [1, 3, 2, 0]
    assert restored == history
