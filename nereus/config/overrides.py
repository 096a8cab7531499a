"""`key.sub=value` on the command line, laid over the values of a campaign file."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from nereus.config.yaml_text import KeyPath, parse_yaml
from nereus.errors import ConfigError, explain

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One assignment."""

    path: tuple[str, ...]
    value: Any


def parse_override(text: str) -> Override:
    """`batch.prompts=4` as a path and a value typed as YAML types it. Raises ConfigError."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(
            explain(
                f"{COMMAND_LINE}: cannot read {text!r}",
                rule="an override has the form key.sub=value",
                remedy="write e.g. batch.prompts=4",
            )
        )
    return Override(path=path, value=parse_yaml(value, source=f"{COMMAND_LINE} ({text})").value)


def apply_overrides(values: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """`values` with the overrides laid over them, the last one winning; a mapping replaces a mapping.

    Raises ConfigError where a path goes through a value that has no keys.
    """
    result = deepcopy(values)
    for override in overrides:
        inner = result
        for depth, part in enumerate(override.path[:-1], start=1):
            if inner.get(part) is None:
                inner[part] = {}
            inner = inner[part]
            if not isinstance(inner, dict):
                through, whole = ".".join(override.path[:depth]), ".".join(override.path)
                raise ConfigError(
                    explain(
                        f"{COMMAND_LINE}: cannot set {whole}",
                        values=f"{through} is {inner!r}",
                        rule="only a mapping has keys below it",
                    )
                )
        inner[override.path[-1]] = override.value
    return result


def is_overridden(path: KeyPath, overrides: Sequence[Override]) -> bool:
    """Whether the value at `path` came from the command line."""
    return any(path[: len(override.path)] == override.path for override in overrides)
