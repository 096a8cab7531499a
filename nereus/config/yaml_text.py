"""YAML text to plain values, with the line of every key; surprises of YAML are refused or switched off.

Scalars follow YAML 1.2: `1e-4` is a number, `no` and `on` are text, `1:30` and `2026-01-01` are text. A key
given twice, several documents in a file, and a node that contains itself are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from nereus.errors import ConfigError, explain

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlText:
    """A parsed text."""

    value: Any
    """Plain values: dict, list, str, int, float, bool, None."""
    lines: Mapping[KeyPath, int]
    """Line, counted from 1, of every key and list entry."""

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest part of it that is in the text; 1 for none."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


class _Loader(yaml.SafeLoader):
    """The safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, *, source: str) -> YamlText:
    """The values of `text`. Raises ConfigError that begins with `source:line`."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return YamlText(value=None, lines={})
        lines = _lines(node, source)
        return YamlText(value=loader.construct_document(node), lines=lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        rule = " ".join(part for part in (error.problem, error.context) if part)
        raise ConfigError(explain(f"{where}: not valid YAML", values=rule)) from error
    except yaml.YAMLError as error:
        raise ConfigError(explain(f"{source}: not valid YAML", values=str(error))) from error
    finally:
        loader.dispose()


def _lines(root: yaml.Node, source: str) -> dict[KeyPath, int]:
    """The line of every path below `root`. Raises ConfigError on a repeated key or a node inside itself."""
    lines: dict[KeyPath, int] = {}

    def walk(node: yaml.Node, path: KeyPath, around: tuple[yaml.Node, ...]) -> None:
        if any(node is outer for outer in around):
            where = ".".join(map(str, path))
            raise ConfigError(f"{source}:{node.start_mark.line + 1}: {where} contains itself by an alias")
        entries: list[tuple[str | int, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            entries = [(str(key.value), key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            entries = [(index, value, value) for index, value in enumerate(node.value)]
        for name, key, value in entries:
            here = (*path, name)
            line = key.start_mark.line + 1
            if here in lines and name != "<<":
                dotted = ".".join(map(str, here))
                raise ConfigError(
                    explain(
                        f"{source}:{line}: {dotted} is given twice",
                        values=f"first in line {lines[here]}",
                        rule="a key may stand once",
                    )
                )
            lines[here] = line
            walk(value, here, (*around, node))

    walk(root, (), ())
    return lines
