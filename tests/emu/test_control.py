"""The logical state: rows of a step under any number of units, and the record that a decision carries."""

from __future__ import annotations

import random
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.emu.control import BatchShape, LogicalState
from nereus.errors import InvalidOperation

CONTROL = Control(
    step=12,
    policy_version=11,
    epoch=3,
    position=96,
    seed=7,
    config_digest="abc",
    optimizers={"actor": OptimizerRecord(adam_steps=24, learning_rate=1e-6)},
    counters={"rollouts": 4096},
    scalars={"loss_scale": 65536.0, "kl_coefficient": 0.1},
)


@given(num_rows=st.integers(1, 500), dp=st.integers(1, 40), most_rows=st.integers(1, 64))
def test_rows_are_dealt_once_in_micro_batches_that_fit(num_rows: int, dp: int, most_rows: int) -> None:
    if dp > num_rows:
        with pytest.raises(InvalidOperation, match="every unit needs at least one row"):
            BatchShape.choose(num_rows=num_rows, dp=dp, most_rows=most_rows)
        return
    shape = BatchShape.choose(num_rows=num_rows, dp=dp, most_rows=most_rows)
    rows: list[int] = []
    for unit in range(dp):
        lo, hi = shape.unit_rows(unit)
        batches = shape.micro_batches(unit)
        assert len(batches) == shape.accumulation
        assert [row for a, b in batches for row in range(a, b)] == list(range(lo, hi))
        assert all(b - a <= shape.micro_batch_rows <= most_rows for a, b in batches)
        rows += range(lo, hi)
    assert rows == list(range(num_rows))
    assert shape.accumulation <= 2 * ceil(ceil(num_rows / dp) / most_rows)


@given(dp=st.sampled_from([1, 2, 4, 8]), a=st.integers(1, 8), b=st.integers(1, 16))
def test_dp_times_rows_times_accumulation_is_held_constant(dp: int, a: int, b: int) -> None:
    num_rows = 8 * a * b
    shape = BatchShape.choose(num_rows=num_rows, dp=dp, most_rows=b)
    assert shape.dp * shape.micro_batch_rows * shape.accumulation == num_rows


@given(seed=st.integers(0, 10_000))
def test_transitions_neither_lose_nor_repeat_a_sample(seed: int) -> None:
    """The samples of every step are those of a run without a transition, whatever changes between steps."""
    rng = random.Random(seed)
    num_rows, num_steps = rng.randint(6, 40), 12
    state = LogicalState(control=CONTROL, batch=BatchShape.choose(num_rows=num_rows, dp=1, most_rows=4))
    consumed: list[list[int]] = []
    for step in range(num_steps):
        if rng.random() < 0.4:
            state = state.with_dp(rng.randint(1, 6), most_rows=rng.randint(1, 9))
        start = step * num_rows
        rows = [
            start + row
            for unit in range(state.batch.dp)
            for lo, hi in state.batch.micro_batches(unit)
            for row in range(lo, hi)
        ]
        consumed.append(rows)
    assert consumed == [list(range(i * num_rows, (i + 1) * num_rows)) for i in range(num_steps)]
    assert state.control == CONTROL


def test_the_logical_state_reads_back_to_the_same_bits() -> None:
    batch = BatchShape.choose(num_rows=96, dp=3, most_rows=8)
    state = LogicalState(control=CONTROL, batch=batch)
    assert LogicalState.from_json(state.to_json()) == state
