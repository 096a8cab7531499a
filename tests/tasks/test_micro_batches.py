"""Rows are dealt to units without loss, in balance, and stand-ins count for nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.algorithms.aggregation import GlobalCounts
from nereus.emu.batch import TokenBatch, TrainBatch
from nereus.tasks.micro_batches import MicroBatch, cut_batch, deal_rows

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
    dealt = deal_rows(lengths, num_units=num_units, micro_batch_rows=micro_batch_rows)
    real = [
        row for unit in dealt for micro in unit for row in micro.rows[: len(micro.rows) - micro.num_padding]
    ]
    assert sorted(real) == list(range(len(lengths)))


@given(lengths=LENGTHS, num_units=st.integers(1, 6), micro_batch_rows=st.integers(1, 9))
def test_units_have_equally_many_micro_batches_within_the_row_limit(
    lengths: list[int], num_units: int, micro_batch_rows: int
) -> None:
    dealt = deal_rows(lengths, num_units=num_units, micro_batch_rows=micro_batch_rows)
    assert len({len(unit) for unit in dealt}) == 1
    assert all(1 <= len(micro.rows) <= micro_batch_rows for unit in dealt for micro in unit)


@given(lengths=st.lists(st.integers(1, 500), min_size=8, max_size=60), num_units=st.integers(2, 4))
def test_units_get_close_to_equal_tokens(lengths: list[int], num_units: int) -> None:
    dealt = deal_rows(lengths, num_units=num_units, micro_batch_rows=4)
    tokens = [
        sum(lengths[row] for micro in unit if not micro.num_padding for row in micro.rows) for unit in dealt
    ]
    # Turning order over a sorted list: two units differ by at most the longest row.
    assert max(tokens) - min(tokens) <= max(lengths)


def test_two_rows_on_four_units_are_filled_up_with_zero_mask_rows() -> None:
    batch = train_batch([5, 9])
    dealt = deal_rows([5, 9], num_units=4, micro_batch_rows=8)
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
    dealt = deal_rows(lengths, num_units=3, micro_batch_rows=2)
    parts = [
        GlobalCounts.from_mask(cut_batch(batch, micro).mask_bt, max_tokens=29)
        for unit in dealt
        for micro in unit
    ]
    assert GlobalCounts.total(parts) == whole
