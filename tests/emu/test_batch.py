"""Rows are selected and joined without mixing them up."""

from __future__ import annotations

import torch

from nereus.emu.batch import Rollouts, TokenBatch, join_rows


def rollouts(rows: list[list[int]], first_id: int) -> Rollouts:
    """Rows of a one-token prompt and the rest as response; log-probabilities equal minus the token."""
    width = max(map(len, rows))
    tokens_bs = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return Rollouts(
        batch=TokenBatch(
            tokens_bs=tokens_bs,
            prompt_lens_b=torch.ones(len(rows), dtype=torch.long),
            response_lens_b=torch.tensor([len(row) - 1 for row in rows]),
        ),
        logprobs_bt=-tokens_bs[:, 1:].float(),
        stopped_b=torch.ones(len(rows), dtype=torch.bool),
        sample_ids_b=torch.arange(first_id, first_id + len(rows)),
        version=3,
    )


def test_joined_rows_are_padded_to_the_widest_and_put_in_order() -> None:
    short, long = rollouts([[1, 2], [3]], first_id=0), rollouts([[4, 5, 6]], first_id=2)
    joined = join_rows([short, long], [2, 0, 1])
    assert joined.batch.tokens_bs.tolist() == [[4, 5, 6], [1, 2, 0], [3, 0, 0]]
    assert joined.logprobs_bt.tolist() == [[-5.0, -6.0], [-2.0, 0.0], [0.0, 0.0]]
    assert joined.sample_ids_b.tolist() == [2, 0, 1]
    assert joined.version == 3


def test_selecting_what_was_joined_gives_the_parts_back() -> None:
    a, b = rollouts([[1, 2, 3], [4]], first_id=0), rollouts([[5, 6]], first_id=2)
    again = join_rows([a, b]).select([2])
    assert again.batch.trimmed().tokens_bs.tolist() == [[5, 6]]
    assert again.batch.response_mask().tolist() == [[True]]
