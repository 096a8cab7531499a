"""A campaign file and overrides to a `CampaignConfig`, or to a message that says what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nereus.config.campaign import CampaignConfig
from nereus.config.keys import has_mark, known_keys, without_tags
from nereus.config.mistakes import describe_mistakes
from nereus.config.overrides import COMMAND_LINE, Override, apply_overrides, is_overridden, parse_override
from nereus.config.paths import IsFunction, IsInputPath, IsOutputPath, resolve_function, resolve_path
from nereus.config.yaml_text import KeyPath, parse_yaml
from nereus.errors import ConfigError, explain


def load_campaign(path: Path, overrides: Sequence[str] = ()) -> CampaignConfig:
    """The campaign of a YAML file, with `key.sub=value` overrides laid over it.

    Files that the campaign file names are resolved against its folder; those that an override names, and
    `output`, against the current directory. Values are not coerced: `"8"` is no number.
    Raises ConfigError with one line for each mistake: where it stands, the key, the value, the rule, the
    remedy.
    """
    text = parse_yaml(_read(path), source=str(path))
    assignments = [parse_override(override) for override in overrides]
    if not isinstance(text.value, dict):
        raise ConfigError(
            explain(
                f"{path}: not a campaign",
                values="empty" if text.value is None else f"a {type(text.value).__name__}",
                rule="a campaign file is a mapping of keys",
                remedy="docs/campaign.md has an example",
            )
        )
    values = apply_overrides(text.value, assignments)
    _resolve_paths(values, folder=path.parent, overrides=assignments)

    def locate(key: KeyPath) -> str:
        if is_overridden(key, assignments):
            return COMMAND_LINE
        return f"{path}:{text.line(key)}" if key else str(path)

    try:
        # Through JSON, because strict validation accepts enums and tuples by their plain form only there.
        return CampaignConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        in_order = sorted(error.errors(), key=lambda mistake: text.line(without_tags(mistake["loc"])))
        raise ConfigError(describe_mistakes(in_order, locate)) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(other.name for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise ConfigError(
            explain(
                f"cannot read {path}",
                values="no such file",
                remedy=f"its folder has {', '.join(near)}" if near else "name a campaign file",
            )
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain(f"cannot read {path}", values=str(error))) from error


def _resolve_paths(values: dict[str, Any], *, folder: Path, overrides: Sequence[Override]) -> None:
    """Make every path in `values` absolute, in place."""
    for key in known_keys():
        *parents, last = key.path
        inner: Any = values
        for part in parents:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get(last), str):
            continue
        base = Path.cwd() if is_overridden(key.path, overrides) else folder
        if has_mark(key.field, IsInputPath):
            inner[last] = resolve_path(inner[last], base)
        elif has_mark(key.field, IsFunction):
            inner[last] = resolve_function(inner[last], base)
        elif has_mark(key.field, IsOutputPath):
            inner[last] = resolve_path(inner[last], Path.cwd())
