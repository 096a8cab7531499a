"""The tests of a program as data sets write them, brought into two forms: inputs with outputs, or code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOutput:
    """A program that reads `input` on stdin has to print `output`."""

    input: str
    output: str


def parse_tests(given: Any, extra: Mapping[str, Any]) -> tuple[InputOutput, ...] | tuple[str, ...]:
    """Cases of input and output, or pieces of code that raise where the program is wrong.

    Understood are a list of `{input, output}`; `{inputs: [...], outputs: [...]}`, also as JSON text; a text
    of code; a list of such texts. Code that defines `check(candidate)`, with `entry_point` in `extra`, is
    HumanEval's. Raises ValueError for anything else.
    """
    if isinstance(given, str):
        if (decoded := _as_json(given)) is not None:
            return parse_tests(decoded, extra)
        return (_with_check(given, extra),)
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= given.keys():
        inputs, outputs = given["inputs"], given["outputs"]
        if len(inputs) == len(outputs) > 0:
            return tuple(
                InputOutput(input=_text(a), output=_text(b)) for a, b in zip(inputs, outputs, strict=True)
            )
    if isinstance(given, Sequence) and given:
        if all(isinstance(test, str) for test in given):
            return tuple(given)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in given):
            return tuple(
                InputOutput(input=_text(test["input"]), output=_text(test["output"])) for test in given
            )
    raise ValueError(
        f"no tests in {given!r:.80}; give a list of {{input, output}}, {{inputs, outputs}}, or code that "
        "asserts"
    )


def same_output(printed: str, wanted: str) -> bool:
    """Whether they agree, but for space at the ends of lines and empty lines at the end."""
    return _lines(printed) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _as_json(text: str) -> Any:
    """A JSON object or list, or None for what is code."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _text(value: Any) -> str:
    """Lines may be given as a list, numbers as numbers."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _with_check(code: str, extra: Mapping[str, Any]) -> str:
    if "def check(" in code and isinstance(extra.get("entry_point"), str):
        return f"{code}\ncheck({extra['entry_point']})\n"
    return code
