"""Dynamic sampling: every prompt is learnt from once, or found without spread once, or given back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.batch import Rollouts, TokenBatch
from nereus.tasks.groups_kept import Answered, keep_groups
from nereus.tasks.score import Rewards

SAMPLES = 2


def answered(spreads: list[bool], first_id: int, *, width: int = 3) -> Answered:
    """Groups of two responses whose rewards differ where asked; row ids count on from `first_id`."""
    rows = len(spreads) * SAMPLES
    batch = TokenBatch(
        tokens_bs=torch.arange(first_id, first_id + rows)[:, None].expand(rows, width + 1).clone(),
        prompt_lens_b=torch.ones(rows, dtype=torch.long),
        response_lens_b=torch.full((rows,), width),
    )
    rollouts = Rollouts(
        batch=batch,
        logprobs_bt=torch.zeros(rows, width),
        stopped_b=torch.ones(rows, dtype=torch.bool),
        sample_ids_b=torch.arange(first_id, first_id + rows),
        version=7,
    )
    values = [float(spread and copy) for spread in spreads for copy in range(SAMPLES)]
    return Answered(rollouts=rollouts, rewards=Rewards(values_b=torch.tensor(values), missing={"timeout": 1}))


def test_prompts_after_the_last_group_that_is_needed_are_given_back() -> None:
    batches = [answered([True, False, True, False], 0), answered([False, True, True, True], 8, width=5)]
    kept = keep_groups(batches, samples=SAMPLES, wanted=4)
    assert (kept.num_taught, kept.num_used) == (4, 7)
    assert kept.taught.rollouts.sample_ids_b.tolist() == [0, 1, 4, 5, 10, 11, 12, 13]
    assert kept.used.rollouts.sample_ids_b.tolist() == list(range(14))
    assert kept.taught.rollouts.version == 7
    assert kept.used.rewards.missing == {"timeout": 2}
    assert kept.taught.rollouts.batch.tokens_bs.shape == (8, 6)  # as wide as the widest batch


def test_with_too_few_groups_everything_is_used_up() -> None:
    kept = keep_groups([answered([False, True, False], 0)], samples=SAMPLES, wanted=2)
    assert (kept.num_taught, kept.num_used) == (1, 3)
    none = keep_groups([answered([False, False], 0)], samples=SAMPLES, wanted=2)
    assert (none.num_taught, none.num_used) == (0, 2)


@settings(max_examples=60, deadline=None)
@given(stream=st.lists(st.booleans(), min_size=40, max_size=40), wanted=st.integers(1, 4))
def test_steps_over_a_stream_of_prompts_learn_from_every_teaching_group_once_and_in_order(
    stream: list[bool], wanted: int
) -> None:
    """Whatever a step draws in vain: with the cursor after `num_used`, none is lost and none comes twice."""
    cursor, learnt = 0, []
    while cursor < len(stream):
        batches, at, kept = [], cursor, None
        while at < len(stream) and (kept is None or kept.num_taught < wanted):
            part = stream[at : at + wanted]
            batches.append(answered(part, at * SAMPLES))
            at += len(part)
            kept = keep_groups(batches, samples=SAMPLES, wanted=wanted)
        assert kept is not None
        learnt += kept.taught.rollouts.sample_ids_b.tolist()
        cursor += kept.num_used
    teaching = [group for group, spread in enumerate(stream) if spread]
    assert learnt == [group * SAMPLES + copy for group in teaching for copy in range(SAMPLES)]
