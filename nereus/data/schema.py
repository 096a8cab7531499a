"""From a record to a row: its prompt and answer, checked, and everything else kept for the reward.

Accepted without any setting: {"prompt": text or messages, ...} with the answer in `ground_truth`,
`answer` or `reward_model.ground_truth`; the last is verl's schema {data_source, prompt, ability,
reward_model, extra_info}. Other names are given as columns; a dot goes into a nested column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal

from nereus.data.files import Record
from nereus.data.prompt import Json
from nereus.errors import DataError, explain

ANSWER_COLUMNS = ("ground_truth", "answer", "reward_model.ground_truth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A record understood: the prompt as text or as turns, the answer, and every other column."""

    where: str
    prompt: str | tuple[Message, ...]
    ground_truth: Json
    extra: Mapping[str, Json]


def parse(record: Record, *, prompt: str = "prompt", answer: str | None = None) -> Row:
    """The row of a record.

    `prompt` and `answer` name columns. Without `answer` the first of `ANSWER_COLUMNS` that the record has
    is taken, or none: a reward may need none. `extra` holds every top-level column but those two.

    Raises DataError where a named column is absent, the prompt is neither text nor messages, or a value
    can't be JSON.
    """
    found, value = _column(record.values, prompt)
    if not found:
        raise _absent(record, "prompts.source.prompt", prompt)
    answer_column, ground_truth = _answer(record, answer)
    used = {prompt, answer_column}
    extra = {name: _as_json(record, name, item) for name, item in record.values.items() if name not in used}
    return Row(
        where=record.where,
        prompt=_prompt(record, prompt, value),
        ground_truth=ground_truth,
        extra=extra,
    )


def _answer(record: Record, answer: str | None) -> tuple[str | None, Json]:
    for name in ANSWER_COLUMNS if answer is None else (answer,):
        found, value = _column(record.values, name)
        if found:
            return name, _as_json(record, name, value)
    if answer is not None:
        raise _absent(record, "prompts.source.answer", answer)
    return None, None


def _column(values: Mapping[str, object], name: str) -> tuple[bool, object]:
    """Whether the column exists, and its value; the exact name first, then dot by dot."""
    if name in values:
        return True, values[name]
    here: object = values
    for part in name.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return False, None
        here = here[part]
    return True, here


def _absent(record: Record, setting: str, name: str) -> DataError:
    return DataError(
        explain(
            f"cannot find column {name!r} in {record.where}",
            values=f"it has the columns {sorted(map(str, record.values))}",
            rule="every record needs it",
            remedy=f"set {setting} to one of them (a dot goes into a nested column), or correct the record",
        )
    )


def _prompt(record: Record, column: str, value: object) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise _bad_prompt(record, column, "an empty text")
        return value
    if not isinstance(value, Sequence) or not value:
        raise _bad_prompt(record, column, f"a {type(value).__name__}: {str(value)[:60]}")
    messages: list[Message] = []
    for turn in value:
        if not isinstance(turn, Mapping):
            raise _bad_prompt(record, column, f"a list with a {type(turn).__name__}")
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise _bad_prompt(record, column, f"a turn with {sorted(map(str, turn))}: {str(turn)[:60]}")
        messages.append(Message(role=role, content=content))
    return tuple(messages)


def _bad_prompt(record: Record, column: str, held: str) -> DataError:
    return DataError(
        explain(
            f"cannot use column {column!r} of {record.where} as a prompt",
            values=f"it holds {held}; the columns are {sorted(map(str, record.values))}",
            rule="a prompt is a text, or a list of turns with the texts role and content",
            remedy="set prompts.source.prompt to the right column, or correct the record; nothing is skipped",
        )
    )


def _as_json(record: Record, column: str, value: object) -> Json:
    """The value in JSON's types. Dates become ISO text and decimals text; what cannot be carried is an
    error.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(record, column, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(record, column, item) for item in value]
    raise DataError(
        explain(
            f"cannot carry column {column!r} of {record.where} to the reward",
            values=f"it holds {type(value).__name__}",
            rule="columns beside the prompt must be JSON values",
            remedy="remove the column from the data; only text prompts are supported",
        )
    )
