"""The indices of a micro-batch equal those of plain loops over its rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.batch import TokenBatch
from nereus.emu.engines.torch.packing import pack
from nereus.errors import DataError

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


def rows(lengths: list[tuple[int, int]]) -> TokenBatch:
    """Rows whose token at column s of row i is 100 i + s."""
    width = max(p + r for p, r in lengths) + 2
    tokens_bs = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        tokens_bs[row, : prompt + response] = 100 * row + torch.arange(prompt + response)
    prompts, responses = zip(*lengths, strict=True)
    return TokenBatch(
        tokens_bs=tokens_bs, prompt_lens_b=torch.tensor(prompts), response_lens_b=torch.tensor(responses)
    )


@given(LENGTHS)
def test_each_response_token_is_read_off_its_predecessor(lengths: list[tuple[int, int]]) -> None:
    packed = pack(rows(lengths))
    expected = [
        (100 * row + prompt + t - 1, 100 * row + prompt + t, row * packed.num_responses + t)
        for row, (prompt, response) in enumerate(lengths)
        for t in range(response)
    ]
    chosen = packed.tokens_n[packed.select_m].tolist()
    assert list(zip(chosen, packed.targets_m.tolist(), packed.places_m.tolist(), strict=True)) == expected
    assert packed.num_responses == max(1, *(response for _, response in lengths))


@given(LENGTHS)
def test_rows_keep_their_tokens_and_positions(lengths: list[tuple[int, int]]) -> None:
    packed = pack(rows(lengths))
    num_rows, width, places_n = packed.attend.num_rows, packed.attend.width, packed.attend.places_n
    if places_n is None:
        places_n = torch.arange(num_rows * width)
    seen = {}
    for place, token, position in zip(
        places_n.tolist(), packed.tokens_n.tolist(), packed.positions_n.tolist(), strict=True
    ):
        seen[place] = token
        assert position == place % width
    for row, (prompt, response) in enumerate(lengths):
        # the last token of a row predicts nothing that is asked for
        for s in range(prompt + response - 1 if response else 0):
            assert seen[row * width + s] == 100 * row + s


@given(LENGTHS)
def test_the_last_token_of_each_row_can_be_read(lengths: list[tuple[int, int]]) -> None:
    packed = pack(rows(lengths), "last")
    expected = [100 * row + prompt + response - 1 for row, (prompt, response) in enumerate(lengths)]
    assert packed.tokens_n[packed.select_m].tolist() == expected
    assert packed.places_m.tolist() == list(range(len(lengths)))


def test_padding_is_packed_away_only_where_there_is_much() -> None:
    assert pack(rows([(3, 4), (4, 3)])).attend.places_n is None
    assert pack(rows([(3, 9), (1, 1)])).num_tokens == 12


def test_rows_without_any_response_still_run() -> None:
    packed = pack(rows([(3, 0), (2, 0)]))
    assert packed.num_tokens == 1
    assert len(packed.select_m) == 0


def test_a_response_without_a_prompt_is_refused() -> None:
    batch = TokenBatch(
        tokens_bs=torch.zeros(1, 3, dtype=torch.long),
        prompt_lens_b=torch.tensor([0]),
        response_lens_b=torch.tensor([3]),
    )
    with pytest.raises(DataError, match="prompt token"):
        pack(batch)
