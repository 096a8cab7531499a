"""Columns: plain, named, nested, verl's schema; what can't be used is an error that lists the columns
seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from decimal import Decimal

import pytest

from nereus.data.files import Record
from nereus.data.schema import Message, Row, parse
from nereus.errors import DataError


def row(values: Mapping[str, object], **columns: str) -> Row:
    return parse(Record(where="a.jsonl line 7", values=values), **columns)


def test_a_plain_record_keeps_every_other_column() -> None:
    got = row({"prompt": "hi", "answer": 4, "level": 2, "tags": ["a", None]})
    assert (got.prompt, got.ground_truth) == ("hi", 4)
    assert got.extra == {"level": 2, "tags": ["a", None]}


def test_verls_schema_is_accepted_without_settings() -> None:
    got = row(
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 0, "split": "train"},
        }
    )
    assert got.prompt == (Message(role="system", content="be brief"), Message(role="user", content="1+1?"))
    assert got.ground_truth == "2"
    assert got.extra["data_source"] == "openai/gsm8k"
    assert got.extra["extra_info"] == {"index": 0, "split": "train"}
    assert got.extra["reward_model"] == {"style": "rule", "ground_truth": "2"}


def test_named_and_nested_columns() -> None:
    got = row(
        {"question": "q?", "meta": {"gold": [1, 2]}, "answer": "x"}, prompt="question", answer="meta.gold"
    )
    assert (got.prompt, got.ground_truth) == ("q?", [1, 2])
    assert got.extra == {"answer": "x", "meta": {"gold": [1, 2]}}
    assert row({"a.b": "exact"}, prompt="a.b").prompt == "exact"


def test_ground_truth_comes_before_answer_and_may_be_absent() -> None:
    assert row({"prompt": "p", "answer": "long", "ground_truth": "short"}).ground_truth == "short"
    assert row({"prompt": "p"}).ground_truth is None


def test_dates_and_decimals_become_text() -> None:
    got = row({"prompt": "p", "day": date(2025, 1, 2), "price": Decimal("1.50")})
    assert got.extra == {"day": "2025-01-02", "price": "1.50"}


@pytest.mark.parametrize(
    ("values", "columns", "says"),
    [
        ({"question": "q", "answer": "a"}, {}, ["'prompt'", "'answer', 'question'", "prompts.source.prompt"]),
        ({"prompt": "p"}, {"answer": "gold"}, ["'gold'", "['prompt']", "prompts.source.answer"]),
        ({"prompt": ""}, {}, ["empty text", "nothing is skipped"]),
        ({"prompt": 3}, {}, ["a int: 3", "a text, or a list of turns"]),
        ({"prompt": ["hi"]}, {}, ["a list with a str"]),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, ["['content', 'role']"]),
        ({"prompt": "p", "image": b"\x00"}, {}, ["'image'", "bytes", "remove the column"]),
    ],
)
def test_what_cannot_be_used_is_an_error_with_line_columns_rule_and_remedy(
    values: dict[str, object], columns: dict[str, str], says: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        row(values, **columns)
    for text in ["a.jsonl line 7", *says]:
        assert text in str(caught.value)
