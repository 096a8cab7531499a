"""The tree's keys: complete, found again when misspelt, and fit for a form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.config import CampaignConfig
from nereus.config.keys import has_mark, known_keys, nearest_keys, without_tags
from nereus.config.paths import IsFunction, IsInputPath, IsOutputPath

LONG = sorted({key.dotted for key in known_keys() if len(key.path[-1]) >= 6})


def test_every_key_has_a_description() -> None:
    undescribed = [key.dotted for key in known_keys() if key.path[-1] != "kind" and not key.field.description]
    assert undescribed == []


def test_every_key_that_names_a_file_is_marked() -> None:
    marks = {
        mark: {key.dotted for key in known_keys() if has_mark(key.field, mark)}
        for mark in (IsInputPath, IsFunction, IsOutputPath)
    }
    models = {f"models.{name}" for name in ("actor", "critic", "reference", "tokenizer", "lora.adapter")}
    assert marks[IsInputPath] == {*models, "prompts.source.path", "evaluation.source.path", "reward.path"}
    assert marks[IsFunction] == {
        "prompts.source.function",
        "evaluation.source.function",
        "reward.function",
        "tools.function",
    }
    assert marks[IsOutputPath] == {"output"}


@given(st.sampled_from(LONG), st.data())
def test_a_slip_of_one_letter_is_found(dotted: str, data: st.DataObject) -> None:
    *parent, last = dotted.split(".")
    at = data.draw(st.integers(0, len(last) - 1))
    slip = last[:at] + last[at + 1 :]
    if any(key.path == (*parent, slip) for key in known_keys()):
        return
    assert nearest_keys((*parent, slip))[0] == dotted


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("learning_rate",), ("optimizer.learning_rate",)),
        (("lr",), ("optimizer.learning_rate",)),
        (("algorithm", "learning_rate"), ("optimizer.learning_rate",)),
        (("max_new_tokens",), ("sampling.max_new_tokens",)),
        (("batch", "num_generations"), ("batch.samples",)),
        (("plan", "actor_traning"), ("plan.actor_training",)),
        (("algorithm", "clip_ratio_c"), ("algorithm.dual_clip",)),
        (("algorithm", "kl", "kl_target"), ("algorithm.kl.adaptive.target",)),
        (("algorithm", "max_num_gen_batches"), ("algorithm.max_batches",)),
        (("qqq",), ()),
    ],
)
def test_nearest_keys(path: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert nearest_keys(path) == expected


def test_tags_of_unions_are_taken_out_of_locations() -> None:
    assert without_tags(("prompts", "source", "file", "limit")) == ("prompts", "source", "limit")
    assert without_tags(("algorithm", "grpo", "kl", "where")) == ("algorithm", "kl", "where")
    assert without_tags(("reward", "model", "nonsense")) == ("reward", "nonsense")
    assert without_tags(("plan", "actor_training", "gpus", 3)) == ("plan", "actor_training", "gpus", 3)


def test_the_schema_has_what_a_form_needs() -> None:
    schema = CampaignConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    for holder, name, number in (
        (schema, "algorithm", 9),
        (schema, "reward", 5),
        (schema["$defs"]["PromptsConfig"], "source", 3),
    ):
        assert len(holder["properties"][name]["anyOf"]) == number, "tabs in the form; oneOf would be raw JSON"
    assert schema["$defs"]["Precision"]["enum"] == ["fp32", "bf16", "fp16"]
    for model in (schema, *schema["$defs"].values()):
        for name, field in model.get("properties", {}).items():
            assert name == "kind" or {"description", "$ref"} & set(field), f"{model['title']}.{name}"
