"""Rows are selected and joined without mixing them up."""

from __future__ import annotations

import pickle
from dataclasses import replace

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


def test_rows_travel_as_they_are_and_without_what_they_are_cut_from() -> None:
    row = [1, 2, 3, *[4] * 1000]
    wide = rollouts([row, [5, 6], [7, 8, 9]], first_id=0)
    cut = replace(
        wide.select([2, 1]), logprobs_bt=wide.logprobs_bt[[2, 1], :2], batch=wide.batch.select([2, 1])
    )
    cut = replace(cut, batch=cut.batch.trimmed())
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(cut, protocol=5, buffer_callback=buffers.append)
    assert len(message) + sum(len(buffer.raw()) for buffer in buffers) < 2000
    shared = [bytes(buffer.raw()) for buffer in buffers]  # as in shared memory, where nobody may write
    for arrived in (pickle.loads(message, buffers=shared), pickle.loads(pickle.dumps(cut))):
        assert type(arrived) is Rollouts
        assert arrived.batch.tokens_bs.tolist() == [[7, 8, 9], [5, 6, 0]]
        assert arrived.logprobs_bt.tolist() == [[-8.0, -9.0], [-6.0, 0.0]]
        assert arrived.sample_ids_b.tolist() == [2, 1]
        assert (arrived.version, arrived.versions_bt) == (3, None)
        arrived.logprobs_bt.zero_()
    assert shared == [bytes(buffer.raw()) for buffer in buffers]
    assert cut.logprobs_bt.tolist() == [[-8.0, -9.0], [-6.0, 0.0]]
