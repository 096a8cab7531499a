"""Scalars follow YAML 1.2, and every key knows its line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.config.yaml_text import parse_yaml
from nereus.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("0", 0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("a.py:f", "a.py:f"),
        ("'1'", "1"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(text, source="t").value
    assert parsed == value
    assert type(parsed) is type(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text("abc 1.e:-#", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_json_is_yaml(value: object) -> None:
    assert parse_yaml(json.dumps(value), source="t").value == value


def test_every_key_knows_its_line() -> None:
    text = parse_yaml("a: 1\nb:\n  c: 2\n  d:\n    - 5\n    - 6\n", source="t")
    assert text.line(("a",)) == 1
    assert text.line(("b", "c")) == 3
    assert text.line(("b", "d", 1)) == 6
    assert text.line(("b", "c", "absent")) == 3
    assert text.line(()) == 1


def test_anchors_and_merges_work() -> None:
    value = parse_yaml("a: &one {x: 1, y: 2}\nb:\n  <<: *one\n  y: 3\n", source="t").value
    assert value["b"] == {"x": 1, "y": 3}


def test_python_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []", source="t")
