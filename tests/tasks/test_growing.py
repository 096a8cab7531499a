"""Responses drawn in segments are the responses drawn whole, where no other weights come in between; and what
is observed between two turns is nobody's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.batch import PromptBatch, Rollouts, Sampling
from nereus.emu.engines.rollouts import side_by_side
from nereus.emu.engines.torch.sampling import uniforms_at
from nereus.tasks.growing import Growing
from nereus.tasks.staleness import staleness

STOP = 2
VOCABULARY = 11


def prompts_of(lens: list[int]) -> PromptBatch:
    tokens_bs = torch.zeros(len(lens), max(lens), dtype=torch.long)
    for row, length in enumerate(lens):
        tokens_bs[row, :length] = torch.arange(3, 3 + length) % VOCABULARY
    return PromptBatch(
        tokens_bs=tokens_bs,
        lens_b=torch.tensor(lens),
        sample_ids_b=torch.arange(len(lens)) * 7,
        greedy_b=torch.zeros(len(lens), dtype=torch.bool),
    )


def answer(prompts: PromptBatch, sampling: Sampling, version: int) -> Rollouts:
    """A policy whose next token depends on the random number at its position and on the tokens before."""
    rows, limit = prompts.num_rows, sampling.max_new_tokens
    u_nb = torch.stack(
        [
            uniforms_at(sampling, prompts.sample_ids_b, prompts.positions_b + position, draws=1)[0]
            for position in range(limit)
        ]
    )
    limits = prompts.limits_b(sampling).tolist()
    tokens_bt, lens_b = torch.zeros(rows, limit, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    stopped_b = torch.zeros(rows, dtype=torch.bool)
    for row in range(rows):
        seen = prompts.tokens_bs[row, : prompts.lens_b[row]].tolist()
        for position in range(limits[row]):
            token = (int(float(u_nb[position, row]) * 1000) + sum(seen)) % VOCABULARY
            seen.append(token)
            tokens_bt[row, position] = token
            lens_b[row] += 1
            if token == STOP:
                stopped_b[row] = True
                break
    return side_by_side(
        prompts,
        tokens_bt,
        lens_b=lens_b,
        logprobs_bt=-tokens_bt.float() - 1.0,
        stopped_b=stopped_b,
        version=version,
    )


def grown(prompts: PromptBatch, sampling: Sampling, segment_tokens: int, versions: list[int]) -> Rollouts:
    growing = Growing(prompts=prompts, max_new_tokens=sampling.max_new_tokens)
    number = 0
    while len(rows := growing.open_r):
        version = versions[min(number, len(versions) - 1)]
        growing.add(rows, answer(growing.to_go_on(rows, most=segment_tokens), sampling, version))
        number += 1
    return growing.finished()


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    limit=st.integers(1, 12),
    segment_tokens=st.integers(1, 13),
    step=st.integers(0, 5),
)
def test_segments_add_up_to_the_whole_responses(
    lens: list[int], limit: int, segment_tokens: int, step: int
) -> None:
    prompts, sampling = prompts_of(lens), Sampling(max_new_tokens=limit, seed=5, step=step)
    whole, parts = answer(prompts, sampling, 3), grown(prompts, sampling, segment_tokens, [3])
    width = whole.batch.max_response
    assert torch.equal(parts.batch.tokens_bs, whole.batch.tokens_bs)
    assert torch.equal(parts.batch.prompt_lens_b, whole.batch.prompt_lens_b)
    assert torch.equal(parts.batch.response_lens_b, whole.batch.response_lens_b)
    mask_bt = whole.batch.response_mask()
    assert torch.equal(parts.logprobs_bt * mask_bt, whole.logprobs_bt[:, :width] * mask_bt)
    assert torch.equal(parts.stopped_b, whole.stopped_b)
    assert torch.equal(parts.sample_ids_b, whole.sample_ids_b)
    assert parts.version == 3


def test_every_token_has_the_version_that_drew_it() -> None:
    prompts, sampling = prompts_of([3, 1, 2]), Sampling(max_new_tokens=10, seed=1)
    rollouts = grown(prompts, sampling, 4, [5, 6, 8])
    assert rollouts.versions_bt is not None
    mask_bt = rollouts.batch.response_mask()
    wanted_t = torch.tensor([5] * 4 + [6] * 4 + [8] * 2)[: mask_bt.shape[1]]
    assert torch.equal(rollouts.versions_bt, wanted_t * mask_bt)
    assert rollouts.version == 5
    lag = staleness(rollouts, 8)
    assert lag["staleness/max"] == 3
    assert lag["staleness/mean"] == float((8 - rollouts.versions_bt[mask_bt]).float().mean())
    assert lag["staleness/versions"] == len(rollouts.versions_bt[mask_bt].unique())


def test_a_response_of_one_policy_has_one_version() -> None:
    whole = answer(prompts_of([2]), Sampling(max_new_tokens=6), 4)
    assert staleness(whole, 6) == {"staleness/mean": 2.0, "staleness/max": 2.0, "staleness/versions": 1.0}


def test_an_observation_is_read_and_not_drawn() -> None:
    prompts, sampling = prompts_of([3, 2]), Sampling(max_new_tokens=12, seed=1)
    growing = Growing(prompts=prompts, max_new_tokens=12)
    first = answer(growing.to_go_on([0, 1], most=3), sampling, 4)
    growing.add([0, 1], first)
    growing.observe(1, [9, 10])
    went_on = growing.to_go_on([1])
    own = first.batch.tokens_bs[1, 2 : 2 + int(first.batch.response_lens_b[1])].tolist()
    assert went_on.tokens_bs[0].tolist() == [3, 4, *own, 9, 10]
    assert went_on.positions_b.tolist() == [len(own) + 2]
    assert went_on.limits_b(sampling).tolist() == [12 - len(own) - 2]
    growing.add([1], answer(went_on, sampling, 6))
    ids, drawn = growing.response(1)
    assert ids[: len(own) + 2] == [*own, 9, 10]
    assert drawn == [True] * len(own) + [False] * 2 + [True] * (len(ids) - len(own) - 2)
    growing.add([0], answer(growing.to_go_on([0]), sampling, 6))
    rollouts = growing.finished()
    mask_bt = rollouts.policy_mask()
    assert mask_bt[1, : len(drawn)].tolist() == drawn
    assert bool((rollouts.logprobs_bt[~mask_bt] == 0).all())
    assert rollouts.policy_lens_b.tolist() == [int(rollouts.batch.response_lens_b[0]), len(ids) - 2]
    assert rollouts.versions_bt is not None
    assert rollouts.versions_bt[1, : len(ids)].tolist() == [4] * len(own) + [0, 0] + [6] * (
        len(ids) - len(own) - 2
    )
    # versions of observed tokens are in no statistic: they would be 6 behind
    assert staleness(rollouts, 6)["staleness/max"] == 2


def test_rows_of_different_lengths_go_on_at_their_own_positions() -> None:
    prompts, sampling = prompts_of([3, 2, 4]), Sampling(max_new_tokens=9, seed=3)
    whole = answer(prompts, sampling, 0)
    growing = Growing(prompts=prompts, max_new_tokens=9)
    growing.add([1], answer(growing.to_go_on([1], most=4), sampling, 0))
    while len(rows := growing.open_r):
        growing.add(rows, answer(growing.to_go_on(rows, most=2), sampling, 0))
    assert torch.equal(growing.finished().batch.tokens_bs, whole.batch.tokens_bs)
