"""Changes of a running campaign: valid ones make a valid configuration, others are refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.config import CampaignConfig
from nereus.config.changes import Changes, read_changes, settings, still_meant, with_changes
from nereus.errors import ConfigError


def campaign(**parts: Any) -> CampaignConfig:
    base: dict[str, Any] = {
        "name": "running",
        "steps": 10,
        "models": {"actor": "model"},
        "prompts": {"source": {"kind": "file", "path": "p.jsonl"}},
        "reward": {"kind": "python", "function": "r.py:f"},
        "algorithm": {"kind": "grpo"},
        "batch": {"prompts": 4, "samples": 4},
        "cluster": {"gpus": 4},
        "plan": {"actor_training": {"tp": 2}},
    }
    return CampaignConfig.model_validate(base | parts)


def adaptive(**parts: Any) -> CampaignConfig:
    return campaign(adaptation={}, plan={}, cluster={"gpus": 4, "max_gpus": 8}, **parts)


@given(
    rate=st.none() | st.floats(1e-9, 1.0),
    steps=st.none() | st.integers(1, 100),
    step=st.integers(0, 9),
)
def test_what_is_left_empty_stays_and_what_is_given_holds(
    rate: float | None, steps: int | None, step: int
) -> None:
    config, changes = campaign(), Changes(learning_rate=rate, steps=steps)
    if steps is not None and steps <= step:
        with pytest.raises(ConfigError, match="steps are done"):
            with_changes(config, changes, step=step)
        return
    after = with_changes(config, changes, step=step)
    assert after.optimizer.learning_rate == (config.optimizer.learning_rate if rate is None else rate)
    assert after.steps == (steps or 10)
    assert with_changes(config, Changes(), step=step) == config


def test_a_forced_plan_is_a_scheduled_transition_and_later_ones_stay() -> None:
    plan = {"actor_training": {"tp": 1, "dp": 4}}
    config = campaign(changes=[{"before_step": 7, "plan": plan}])
    forced = Changes.model_validate({"plan": {"actor_training": {"tp": 4}}})
    after = with_changes(config, forced, step=3)
    assert [change.before_step for change in after.changes] == [3, 7]
    assert after.plan_at(2) == config.plan
    assert after.plan_at(3).actor_training.tp == 4
    assert after.plan_at(7) == config.plan_at(7)


def test_a_plan_on_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot change the campaign"):
        with_changes(campaign(), Changes.model_validate({"plan": {"actor_training": {"tp": 64}}}), step=3)


def test_a_job_that_adapts_is_told_by_choices_that_a_later_freedom_takes_back() -> None:
    forced = Changes.model_validate({"plan": {"actor_training": {"tp": 2, "dp": 2}}})
    first = with_changes(adaptive(), forced, step=3)
    second = with_changes(first, Changes(forbid=("actor.generation=tp4pp1",)), step=5)
    assert second.adaptation is not None
    assert {"actor.training.tp=2", "actor.training.dp=2", "actor.generation.avoid=tp4pp1"} <= {
        *second.adaptation.fixed
    }
    third = with_changes(second, Changes(free=True), step=6)
    assert third == adaptive()


def test_fewer_gpus_than_the_campaign_began_with_are_its_new_limit() -> None:
    after = with_changes(adaptive(), Changes(max_gpus=2), step=3)
    assert (after.cluster.gpus, after.cluster.max_gpus) == (2, 2)


@pytest.mark.parametrize("changes", [{"max_gpus": 2}, {"forbid": ["actor.training=tp2pp1"]}, {"free": True}])
def test_a_job_with_a_fixed_plan_refuses_what_only_a_planner_can_follow(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="adaptation"):
        with_changes(campaign(), Changes.model_validate(changes), step=3)


def test_an_asynchronous_campaign_takes_more_steps_or_fewer() -> None:
    plan = {"actor_training": {"tp": 2}, "actor_generation": {"tp": 2, "gpus": [2, 3]}}
    config = campaign(plan=plan, asynchrony={"staleness": 1})
    assert with_changes(config, Changes(steps=20), step=3).steps == 20
    assert with_changes(config, Changes(steps=4), step=3).steps == 4
    with pytest.raises(ConfigError, match="steps are done"):
        with_changes(config, Changes(steps=3), step=3)


def test_texts_are_read_as_yaml_and_mistakes_are_named() -> None:
    texts = ["learning_rate=1e-5", "plan.actor_training={tp: 2}", "forbid=[actor.training=tp4pp2]"]
    read = read_changes(texts)
    assert read.learning_rate == 1e-5
    assert read.plan is not None
    assert read.plan.actor_training.tp == 2
    for text in ("learning_rate=0", "speed=2", "forbid=[tp4]", "steps=many"):
        with pytest.raises(ConfigError, match="command line"):
            read_changes([text])


@pytest.mark.parametrize("make", [campaign, adaptive])
def test_a_setting_that_was_edited_since_holds_over_an_older_change(
    make: Callable[..., CampaignConfig],
) -> None:
    parts: dict[str, Any] = {"steps": 9, "learning_rate": 1e-5, "plan": {"actor_training": {"tp": 4}}}
    changes, before = Changes.model_validate(parts), make()
    assert still_meant(changes, settings(before), before) == changes
    assert still_meant(changes, settings(before), make(steps=20)) == changes.model_copy(
        update={"steps": None}
    )
    edited = make(optimizer={"learning_rate": 1e-3})
    assert still_meant(changes, settings(before), edited).learning_rate is None
    assert still_meant(changes, {}, make(steps=20)) == changes, "lines of older runs say nothing of before"


def test_changes_of_a_planner_go_with_it() -> None:
    changes = Changes(max_gpus=2, forbid=("actor.training=tp2pp1",), steps=9)
    left = still_meant(changes, settings(adaptive()), campaign())
    assert left == Changes(steps=9)
    assert with_changes(campaign(), left, step=1).steps == 9
