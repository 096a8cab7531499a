"""A plan's options in a running job: which rows run at once, and what a model-stage is told."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.tasks.dealing import rounds


@given(
    num_rows=st.integers(1, 40), num_units=st.integers(1, 5), resident=st.one_of(st.none(), st.integers(1, 9))
)
def test_rounds_hold_every_row_once_and_no_unit_more_than_it_may(
    num_rows: int, num_units: int, resident: int | None
) -> None:
    parts = rounds(torch.arange(num_rows), num_units, resident)
    assert torch.cat(parts).tolist() == list(range(num_rows))
    if resident is None:
        assert len(parts) == 1
    else:
        assert all(-(-len(part) // num_units) <= resident for part in parts)
