"""`replay` as a flow: every policy's seconds, by the words of the command line."""

from __future__ import annotations

import pytest

from nereus.errors import ConfigError
from nereus.flows.plan import PlanQuestion
from nereus.flows.replay import ReplayQuestion, replay


def test_policies_are_compared_and_a_wrong_word_is_told_at_once(server: None) -> None:
    job = PlanQuestion(model="llama-3.1-8b", cluster="2x8xH100", algo="grpo", batch=256)
    question = ReplayQuestion(job=job, trace="steady", policies="payback,never", mean_len="500..2k", steps=6)
    seconds = replay(question)
    assert set(seconds) == {"payback", "never"}
    assert 0 < seconds["payback"] <= seconds["never"] * 1.001  # payback moves only where that pays
    with pytest.raises(ConfigError, match="perhaps"):
        replay(question.model_copy(update={"policies": "perhaps"}))
