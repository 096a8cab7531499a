"""Rows are dealt to units without loss, in balance, and stand-ins count for nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TokenBatch, TrainBatch
from nereus.tasks.micro_batches import (
    Limit,
    MicroBatch,
    cut_batch,
    deal_rows,
    limit_under,
    planned_rows,
)

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


def train_batch(lengths: list[int]) -> TrainBatch:
    """Rows whose prompt is one token and whose response has the given length minus one."""
    responses_b = torch.tensor([n - 1 for n in lengths])
    width = max(1, max(lengths) - 1)
    mask_bt = (torch.arange(width) < responses_b[:, None]).float()
    return TrainBatch(
        batch=TokenBatch(
            tokens_bs=torch.arange(len(lengths))[:, None].expand(-1, max(lengths)).clone(),
            prompt_lens_b=torch.ones(len(lengths), dtype=torch.long),
            response_lens_b=responses_b,
        ),
        mask_bt=mask_bt,
        advantages_bt=mask_bt * 2,
    )


@given(lengths=LENGTHS, num_units=st.integers(1, 6), micro_batch_rows=st.integers(1, 9))
def test_every_row_is_dealt_once(lengths: list[int], num_units: int, micro_batch_rows: int) -> None:
    dealt = deal_rows(lengths, num_units=num_units, limit=Limit(rows=micro_batch_rows))
    real = [
        row for unit in dealt for micro in unit for row in micro.rows[: len(micro.rows) - micro.num_padding]
    ]
    assert sorted(real) == list(range(len(lengths)))


@given(lengths=LENGTHS, num_units=st.integers(1, 6), micro_batch_rows=st.integers(1, 9))
def test_units_have_equally_many_micro_batches_within_the_row_limit(
    lengths: list[int], num_units: int, micro_batch_rows: int
) -> None:
    dealt = deal_rows(lengths, num_units=num_units, limit=Limit(rows=micro_batch_rows))
    assert len({len(unit) for unit in dealt}) == 1
    assert all(1 <= len(micro.rows) <= micro_batch_rows for unit in dealt for micro in unit)


@given(lengths=st.lists(st.integers(1, 500), min_size=8, max_size=60), num_units=st.integers(2, 4))
def test_units_get_close_to_equal_tokens(lengths: list[int], num_units: int) -> None:
    dealt = deal_rows(lengths, num_units=num_units, limit=Limit(rows=4))
    tokens = [
        sum(lengths[row] for micro in unit if not micro.num_padding for row in micro.rows) for unit in dealt
    ]
    # Turning order over a sorted list: two units differ by at most the longest row.
    assert max(tokens) - min(tokens) <= max(lengths)


def test_two_rows_on_four_units_are_filled_up_with_zero_mask_rows() -> None:
    batch = train_batch([5, 9])
    dealt = deal_rows([5, 9], num_units=4, limit=Limit(rows=8))
    parts = [cut_batch(batch, micro) for unit in dealt for micro in unit]
    assert len(parts) == 4
    assert sum(float(part.mask_bt.sum()) for part in parts) == float(batch.mask_bt.sum())
    assert sum(not part.mask_bt.any() for part in parts) == 2


def test_cut_batch_drops_columns_that_all_rows_pad() -> None:
    batch = train_batch([9, 3, 4])
    part = cut_batch(batch, MicroBatch(rows=(1, 2)))
    assert part.batch.tokens_bs.shape == (2, 4)
    assert part.mask_bt.shape == (2, 3)
    assert part.advantages_bt is not None
    assert part.advantages_bt.shape == (2, 3)


def test_counts_of_the_parts_add_up_to_those_of_the_batch() -> None:
    lengths = [4, 7, 2, 9, 9, 1, 30]
    batch = train_batch(lengths)
    whole = GlobalCounts.from_mask(batch.mask_bt, max_tokens=29)
    dealt = deal_rows(lengths, num_units=3, limit=Limit(rows=2))
    parts = [
        GlobalCounts.from_mask(cut_batch(batch, micro).mask_bt, max_tokens=29)
        for unit in dealt
        for micro in unit
    ]
    assert GlobalCounts.total(parts) == whole


BUDGETS = st.integers(20, 2000)


def real_rows(unit: tuple[MicroBatch, ...]) -> list[int]:
    return [row for micro in unit for row in micro.rows[: len(micro.rows) - micro.num_padding]]


@given(lengths=LENGTHS, num_units=st.integers(1, 6), tokens=BUDGETS, pads=st.booleans())
def test_by_tokens_every_row_is_dealt_once_in_equally_many_micro_batches(
    lengths: list[int], num_units: int, tokens: int, pads: bool
) -> None:
    limit = Limit(rows=1, tokens=tokens, pads=pads)
    dealt = deal_rows(lengths, num_units=num_units, limit=limit)
    assert sorted(row for unit in dealt for row in real_rows(unit)) == list(range(len(lengths)))
    assert len({len(unit) for unit in dealt}) == 1


@given(lengths=LENGTHS, num_units=st.integers(1, 6), tokens=BUDGETS, pads=st.booleans())
def test_no_micro_batch_has_more_tokens_than_the_limit_but_a_row_alone(
    lengths: list[int], num_units: int, tokens: int, pads: bool
) -> None:
    limit = Limit(rows=1, tokens=tokens, pads=pads)
    for unit in deal_rows(lengths, num_units=num_units, limit=limit):
        for micro in unit:
            own = [lengths[row] for row in micro.rows]
            size = len(own) * max(own) if pads else sum(own)
            assert len(own) == 1 or size <= tokens


@given(lengths=st.lists(st.integers(1, 500), min_size=8, max_size=60), num_units=st.integers(2, 4))
def test_by_tokens_units_differ_by_the_longest_row_at_most(lengths: list[int], num_units: int) -> None:
    dealt = deal_rows(lengths, num_units=num_units, limit=Limit(rows=1, tokens=800))
    tokens = [sum(lengths[row] for row in real_rows(unit)) for unit in dealt]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_a_token_limit_takes_fewer_fuller_micro_batches_than_rows_of_the_longest() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.empty(256).log_normal_(5.0, 1.0, generator=draw).long().clamp(1, 2048).tolist()
    by_rows = deal_rows(lengths, num_units=2, limit=Limit(rows=2))  # rows that fit when all are the longest
    by_tokens = deal_rows(lengths, num_units=2, limit=Limit(rows=2, tokens=4096))
    # 256 rows with 62,000 tokens: 64 passes a unit against 8, all within 4 % of one another
    assert len(by_rows[0]) == 64
    assert len(by_tokens[0]) <= 9
    sums = [sum(lengths[row] for row in micro.rows) for unit in by_tokens for micro in unit]
    assert max(sums) <= 1.04 * min(sums)


def test_a_planners_rows_stand_for_tokens_of_the_longest_rows() -> None:
    limit = Limit(rows=8, tokens=5000)
    assert planned_rows(limit, longest_tokens=1200) == 4
    assert planned_rows(limit, longest_tokens=9000) == 1
    assert planned_rows(Limit(rows=8), longest_tokens=1200) == 8
    assert limit_under(limit, None, 1200) == limit
    assert limit_under(limit, 4, 1200).tokens == 5000  # as asked for
    assert limit_under(limit, 2, 1200).tokens == 2400  # a plan with less memory
    assert limit_under(Limit(rows=8), 2, 1200) == Limit(rows=2)
