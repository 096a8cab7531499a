"""Pydantic's errors as lines for the user: where, which key, which value, which rule, what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic_core import ErrorDetails

from nereus.config.keys import known_keys, nearest_keys, without_tags
from nereus.config.yaml_text import KeyPath
from nereus.errors import explain

MAX_VALUE_LENGTH = 60
Locate = Callable[[KeyPath], str]


def describe_mistakes(errors: Sequence[ErrorDetails], locate: Locate) -> str:
    """One line for each mistake; `locate` says where a key path stands, e.g. `grpo.yaml:12`."""
    return "\n".join(_describe(error, locate) for error in errors)


def _describe(error: ErrorDetails, locate: Locate) -> str:
    path = without_tags(error["loc"])
    kind, given = error["type"], error["input"]
    dotted = ".".join(map(str, path))
    if kind == "extra_forbidden":
        return explain(f"{locate(path)}: {dotted}", values="unknown key", remedy=_known_instead(path))
    if kind == "missing":
        values, rule, remedy = "absent", "this key is required", _meaning(path)
    elif kind == "union_tag_not_found":
        path = (*path, "kind")
        dotted = ".".join(map(str, path))
        values, rule, remedy = "absent", f"must be one of {_kinds(path)}", f"add {dotted}"
    elif kind == "union_tag_invalid":
        path, given = (*path, "kind"), error["ctx"]["tag"]
        dotted = ".".join(map(str, path))
        values, rule, remedy = _shown(given), f"must be one of {_kinds(path)}", _close(given, _kinds(path))
    elif kind in {"enum", "literal_error"}:
        choices = error["ctx"]["expected"]
        values, rule, remedy = _shown(given), f"must be {choices}", _close(given, choices)
    elif kind == "value_error":
        values, rule, remedy = "", str(error["ctx"]["error"]), ""
        return f"{locate(path)}: {dotted}: {rule}" if dotted else f"{locate(path)}: {rule}"
    else:
        values, rule, remedy = _shown(given), _rule(error["msg"]), _type_remedy(path, kind, given)
    return explain(
        f"{locate(path)}: {dotted}" if dotted else locate(path), values=values, rule=rule, remedy=remedy
    )


def _shown(value: Any) -> str:
    """The value as it would stand in YAML flow style, cut when long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1] + "…"


def _rule(message: str) -> str:
    """Pydantic's `Input should be ...` as a rule: `must be ...`."""
    return re.sub(r"^\w+ should ", "must ", message)


def _type_remedy(path: KeyPath, kind: str, given: Any) -> str:
    """What to do about a value of the wrong type, where there is one likely reason."""
    if kind == "bool_type":
        return "write true or false"
    if given == "none" or given == "None":
        nullable = any(
            key.path == path and type(None) in get_args(key.field.annotation) for key in known_keys()
        )
        return "write null" if nullable else ""
    if kind == "string_type" and isinstance(given, int | float):
        return f'quote it: "{given}"'
    if isinstance(given, str) and re.fullmatch(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?", given):
        return "leave out the quotes"
    return ""


def _close(given: Any, choices: str) -> str:
    words = re.findall(r"'([^']*)'", choices)
    near = get_close_matches(str(given).lower().replace("_", "-"), words, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""


def _kinds(path: KeyPath) -> str:
    """The values of `kind` at `path`, quoted as pydantic quotes them."""
    kinds = [key.field.default for key in known_keys() if key.path == path]
    return ", ".join(f"'{kind}'" for kind in kinds)


def _meaning(path: KeyPath) -> str:
    texts = [key.field.description for key in known_keys() if key.path == path]
    return f"add it: {texts[0].splitlines()[0]}" if texts and texts[0] else ""


def _known_instead(path: KeyPath) -> str:
    """What to write instead of an unknown key; places in lists do not count."""
    path = tuple(part for part in path if isinstance(part, str))
    if kinds := [key.kind for key in known_keys() if key.path == path and key.kind]:
        where = ".".join(map(str, path[:-1]))
        *others, last = dict.fromkeys(kinds)
        owners = f"{', '.join(others)} and {last}" if others else last
        return f"{path[-1]} belongs to {where}.kind {owners}; take it out, or change the kind"
    if near := nearest_keys(path):
        return f"did you mean {' or '.join(near)}?"
    names = sorted({key.path[-1] for key in known_keys() if key.path[:-1] == path[:-1]})
    return f"known keys here: {', '.join(names)}" if names else ""
