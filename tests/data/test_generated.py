"""Prompts from a Python function and from reasoning-gym."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nereus.data.generated import generate_records, load_function
from nereus.data.gym import gym_records
from nereus.errors import DataError

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass  # with it, dataclasses look their module up in sys.modules

@dataclass
class Made:
    n: int

def letters(n, start="a"):
    for i in range(Made(n).n):
        yield {"prompt": chr(ord(start) + i)}

def broken():
    yield {"prompt": "ok"}
    raise KeyError("gone")

def number():
    return 3

def bare():
    return ["text"]

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "letters.py"
    path.write_text(SOURCE)
    return str(path)


def test_records_come_in_order_and_are_named(file: str) -> None:
    records = list(generate_records(f"{file}:letters", {"n": 3, "start": "x"}))
    assert [record.values for record in records] == [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}]
    assert records[2].where == f"{file}:letters record 3"


def test_siblings_of_the_file_can_be_imported_and_the_path_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "sibling_of_prompts.py").write_text("TEXT = 'hi'\n")
    (tmp_path / "make.py").write_text(
        "from sibling_of_prompts import TEXT\ndef f():\n    return [{'prompt': TEXT}]\n"
    )
    before = [*sys.path]
    assert [record.values for record in generate_records(f"{tmp_path / 'make.py'}:f", {})] == [
        {"prompt": "hi"}
    ]
    assert sys.path == before


def test_a_function_is_found_by_import_path() -> None:
    assert load_function("json:dumps")({"a": 1}) == '{"a": 1}'


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "KeyError: 'gone'"),
        ("number", "must return an iterable"),
        ("bare", "record 1 .* it is a str"),
        ("constant", "it is a int"),
        ("absent", "AttributeError"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error(file: str, name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        list(generate_records(f"{file}:{name}", {}))


@pytest.mark.parametrize("target", ["nofunction", "absent.module:f", "absent.py:f", ":f", "json:"])
def test_a_name_that_leads_nowhere_is_an_error(target: str) -> None:
    with pytest.raises(DataError, match=r"cannot (find|load)"):
        load_function(target)


def test_gym_problems_are_the_same_each_time_and_carry_what_the_scorer_needs() -> None:
    settings = {"min_numbers": 3, "max_numbers": 3}
    first, again = (
        [record.values for record in gym_records(name="countdown", size=4, seed=42, config=settings)]
        for _ in range(2)
    )
    assert first == again
    assert len({str(values["prompt"]) for values in first}) == 4
    assert first[2]["reasoning_gym"] == {
        "name": "countdown", "size": 4, "seed": 42, "config": settings, "index": 2,
    }  # fmt: skip


def test_an_unknown_gym_task_names_the_nearest() -> None:
    with pytest.raises(DataError, match="countdown"):
        list(gym_records(name="countdwn", size=1, seed=0, config={}))


def test_options_that_a_gym_task_refuses_are_an_error() -> None:
    with pytest.raises(DataError, match="options of that task"):
        list(gym_records(name="countdown", size=1, seed=0, config={"no_such_option": 1}))
