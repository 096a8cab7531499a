"""Turns: the policy's ids stay the engine's, observations are read in between, and where is no matter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu.batch import PromptBatch, Rollouts, Sampling
from nereus.emu.engines.torch.decode_forward import DecodeForward
from nereus.emu.engines.torch.engine import TorchEngine
from nereus.emu.engines.torch.waiting import PATIENCE
from nereus.emu.source import fill
from nereus.errors import DataError
from nereus.rewards.tools import Observation, ToolRequest
from nereus.tasks.feeding import run_fed
from nereus.tasks.generate import _in_rounds
from nereus.tasks.score import drawn_by_policy
from nereus.tasks.stages import GENERATION
from nereus.tasks.turns import Turns, turn_stats, turns_of
from tests.emu.engines.generate_cases import alone, make_prompts, responses
from tests.emu.engines.torch_cases import ADAM, SMALL, Random
from tests.tasks.turn_cases import Letters, Tool, Units, job_with, turns_of_rows

STOPS = (3, 8, 20, 40, 50)  # a turn of a random model is about 12 tokens long
HOW = Sampling(max_new_tokens=40, seed=11, step=2, stop_token_ids=STOPS)
LOGPROB_TOLERANCE = 1e-4  # float32 sums in another order over logits of order 1
VOCABULARY = SMALL.vocab_size


def echo(request: ToolRequest) -> Observation:
    """The turn's last letters backwards; some rows want no more."""
    if sum(map(ord, request.turn)) % 5 == 0:
        return Observation(text=None)
    return Observation(text=request.turn[-3:][::-1], state=len(request.turns))


def prompts_of(num: int) -> PromptBatch:
    draw = random.Random(4)
    return make_prompts([[draw.randrange(67) for _ in range(draw.randrange(1, 7))] for _ in range(num)])


def fed(num: int, *, num_units: int = 1, slots: int | None = None, seed: int | None = None) -> Rollouts:
    delays = None if seed is None else random.Random(seed)
    turns = turns_of_rows(prompts_of(num), HOW, Tool(echo, delays), vocab_size=VOCABULARY)
    units = Units([alone(SMALL, max_rows=slots) for _ in range(num_units)], random.Random(seed))
    run_fed(job_with(units), GENERATION, turns, range(num), HOW, 0, slots=slots)
    closed = {rank for rank, _, goes_on in units.calls if not goes_on}
    assert closed == {rank for rank, _, _ in units.calls}, "every session is ended"
    assert all(generator._session is None for generator in units.generators)
    return turns.growing.finished()


class Bracketed(Letters):
    """Brackets are tokens of their own."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        texts = [text.replace("<", "}").replace(">", "~") for text in texts]
        return super().encode(texts, add_special_tokens=add_special_tokens)


def run_to_end(turns: Turns, tokenizer: Letters | None = None) -> Rollouts:
    turns.tokenizer = tokenizer or turns.tokenizer
    num = turns.growing.prompts.num_rows
    units = Units([alone(SMALL)], random.Random(0))
    run_fed(job_with(units), GENERATION, turns, range(num), HOW, 0, slots=None)
    return turns.growing.finished()


def assert_equal(found: Rollouts, expected: Rollouts) -> None:
    assert responses(found) == responses(expected)
    assert torch.equal(found.policy_mask(), expected.policy_mask())
    torch.testing.assert_close(found.logprobs_bt, expected.logprobs_bt, rtol=0, atol=LOGPROB_TOLERANCE)


@settings(max_examples=6, deadline=None)
@given(
    num=st.integers(1, 24),
    num_units=st.integers(1, 3),
    slots=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 1000),
)
def test_units_slots_and_slow_tools_do_not_change_what_is_drawn(
    num: int, num_units: int, slots: int | None, seed: int
) -> None:
    assert_equal(fed(num, num_units=num_units, slots=slots, seed=seed), fed(num))


@pytest.mark.parametrize("tokens", [40, 5])
def test_rounds_and_segments_draw_what_rows_that_come_back_draw(tokens: int) -> None:
    turns = turns_of_rows(prompts_of(12), HOW, Tool(echo), vocab_size=VOCABULARY)
    job = job_with(Units([alone(SMALL)], random.Random(0)))
    _in_rounds(job, turns, replace(HOW, max_new_tokens=tokens), lambda: 0, "generate")
    assert_equal(turns.growing.finished(), fed(12))


def test_the_policys_ids_stay_and_only_the_observation_is_made_from_text() -> None:
    tool = Tool(echo)
    turns = turns_of_rows(prompts_of(16), HOW, tool, vocab_size=VOCABULARY)
    run_fed(
        job_with(Units([alone(SMALL)], random.Random(0))), GENERATION, turns, range(16), HOW, 0, slots=None
    )
    rollouts, letters = turns.growing.finished(), Letters()
    assert any(len(request.turns) == 2 for request in tool.asked)
    for row, (ids, drawn) in enumerate(zip(responses(rollouts), drawn_by_policy(rollouts), strict=True)):
        assert drawn[-1], "a response ends with the policy's own"
        parts = turns_of(ids, drawn)
        assert len(parts) <= 4
        assert all(part[-1] in STOPS for part in parts[:-1])
        said = [request for request in tool.asked if request.sample_id == row]
        texts = [told.text for told in map(echo, said) if told.text is not None][: len(parts) - 1]
        expected: list[int] = []
        for part, text in itertools.zip_longest(parts, texts):
            expected += [
                *part,
                *(() if text is None else letters.encode([text], add_special_tokens=False)[0]),
            ]
        assert ids == expected


def test_log_probabilities_of_a_turn_are_those_after_what_was_observed() -> None:
    generator, rollouts = alone(SMALL), fed(16)
    engine = TorchEngine(SMALL, generator.layout, generator.groups, optimizer=ADAM)
    fill(engine.state, Random(SMALL), {"theta": "theta"})
    scores = engine.score(rollouts.batch, micro_batch_rows=4)
    assert scores.logprobs_bt is not None
    mask_bt = rollouts.policy_mask()
    assert not bool(mask_bt[rollouts.batch.response_mask()].all())
    torch.testing.assert_close(
        scores.logprobs_bt[mask_bt], rollouts.logprobs_bt[mask_bt], rtol=0, atol=LOGPROB_TOLERANCE
    )


def test_a_row_that_waits_for_its_tool_holds_up_no_other() -> None:
    class Patient(Tool):
        """Answers row 0 when all others are whole: if it blocked one of them, this would never end."""

        def results(self, *, wait_s: float) -> dict[int, Observation]:
            found = super().results(wait_s=wait_s)
            if 0 in found and (set(turns._away) | set(turns.growing.open_r.tolist())) - {0}:
                self._away[0] = (1, found.pop(0))
            return found

    turns = turns_of_rows(prompts_of(9), HOW, Patient(lambda request: Observation(text="AB")), vocab_size=67)
    units = Units([alone(SMALL, max_rows=3)], random.Random(0))
    run_fed(job_with(units), GENERATION, turns, range(9), HOW, 0, slots=3)
    assert len(turns.growing.finished().batch.tokens_bs) == 9
    assert any(num_rows == 0 and goes_on for _, num_rows, goes_on in units.calls)


def test_rows_that_none_came_with_go_on_a_few_tokens_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = DecodeForward.step
    monkeypatch.setattr(DecodeForward, "step", lambda self, tokens: steps.append(1) or step(self, tokens))
    prompts, generator = prompts_of(16), alone(SMALL)
    generator.feed(prompts, HOW, 0, begin=True, more=True)
    before = len(steps)
    generator.feed(prompts.select([]), HOW, 0, begin=False, more=True)
    assert len(steps) - before == PATIENCE


@pytest.mark.parametrize("max_turns", [2, 3])
def test_after_the_last_turn_no_tool_is_called(max_turns: int) -> None:
    tool = Tool(lambda request: Observation(text="A"))
    turns = turns_of_rows(prompts_of(8), HOW, tool, vocab_size=67, max_turns=max_turns)
    rollouts = run_to_end(turns)
    counts = [len(turns_of(*row)) for row in zip(responses(rollouts), drawn_by_policy(rollouts), strict=True)]
    assert max(counts) == max_turns
    assert max(len(request.turns) for request in tool.asked) == max_turns - 1
    told = turn_stats(rollouts)
    assert told["turns/max"] == max_turns
    assert told["turns/mean"] == pytest.approx(sum(counts) / 8)
    assert told["observed_tokens/mean"] == pytest.approx((sum(counts) - 8) / 8)
    lens_b = rollouts.batch.response_lens_b.float()
    assert told["policy_tokens/mean"] + told["observed_tokens/mean"] == pytest.approx(float(lens_b.mean()))


def test_an_observation_is_cut_within_what_stands_around_it() -> None:
    tool = Tool(lambda request: Observation(text="ABCDEFGH"))
    settings = {"template": "<{observation}>", "max_observation_tokens": 5, "max_turns": 2}
    turns = turns_of_rows(prompts_of(6), HOW, tool, vocab_size=67, **settings)
    with pytest.raises(AssertionError, match="an observation"):
        Letters().encode(["A"], add_special_tokens=True)
    rollouts = run_to_end(turns, Bracketed())
    observed = [
        [token for token, is_drawn in zip(ids, drawn, strict=True) if not is_drawn]
        for ids, drawn in zip(responses(rollouts), drawn_by_policy(rollouts), strict=True)
    ]
    assert [60, 0, 1, 2, 61] in observed
    assert all(part in ([], [60, 0, 1, 2, 61]) for part in observed)


def test_an_observation_without_room_for_a_token_after_it_ends_the_response() -> None:
    tool = Tool(lambda request: Observation(text="A" * 39))
    rollouts = run_to_end(turns_of_rows(prompts_of(8), HOW, tool, vocab_size=67))
    assert tool.asked
    assert bool(rollouts.policy_mask().eq(rollouts.batch.response_mask()).all())


def test_a_tool_that_says_nothing_ends_the_response() -> None:
    for text in (None, ""):
        tool = Tool(lambda request, text=text: Observation(text=text))
        rollouts = run_to_end(turns_of_rows(prompts_of(8), HOW, tool, vocab_size=67))
        assert turn_stats(rollouts)["turns/max"] == 1.0
        assert len(tool.asked) == int(rollouts.stopped_b.sum())


def test_state_comes_back_with_the_next_turn_and_a_failure_does_not_lose_it() -> None:
    def stateful(request: ToolRequest) -> Observation:
        if len(request.turns) == 2:
            return Observation(text="B", reason="timeout")
        return Observation(text="A", state={"turns": len(request.turns)})

    tool = Tool(stateful)
    run_to_end(turns_of_rows(prompts_of(12), HOW, tool, vocab_size=67, max_turns=5))
    for request in tool.asked:
        known = {1: None, 2: {"turns": 1}, 3: {"turns": 1}, 4: {"turns": 3}}
        assert request.state == known[len(request.turns)]
        assert request.turn == request.turns[-1]
        assert request.ground_truth == request.sample_id
    assert max(len(request.turns) for request in tool.asked) >= 3


def test_a_token_beyond_the_models_vocabulary_is_refused() -> None:
    turns = turns_of_rows(prompts_of(4), HOW, Tool(lambda request: Observation(text="~")), vocab_size=40)
    with pytest.raises(DataError, match=r"has token 61.*vocabulary ends at 39"):
        run_to_end(turns)


def test_tools_are_called_again_after_a_failure_lost_their_answers() -> None:
    tool = Tool(lambda request: Observation(text="A"), random.Random(1))
    turns = turns_of_rows(prompts_of(8), HOW, tool, vocab_size=67)
    generator = alone(SMALL)
    turns.take(range(8), generator.generate(turns.prompts(range(8)), HOW, 0))
    waiting = set(turns._away)
    assert waiting
    turns.begin_again()
    turns.settle()
    assert not turns._away
    assert waiting == set(turns.growing.open_r.tolist())
