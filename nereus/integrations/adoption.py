"""A foreign configuration read into a campaign, with the fate of every one of its settings. Pure.

foreign settings (flat: dotted key -> value) ─▶ rules ─▶ tree of a CampaignConfig
                                                    └─▶ entries: mapped, the same anyway, not needed,
                                                                 not supported, not known
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nereus.config import CampaignConfig

Settings = Mapping[str, Any]
Tree = dict[str, Any]


class Fate(StrEnum):
    """What became of a setting."""

    MAPPED = "mapped"
    NOT_NEEDED = "not needed"
    UNSUPPORTED = "not supported"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One foreign setting."""

    key: str
    value: Any
    fate: Fate
    target: str = ""
    """The campaign's key, where there is one."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one foreign key is read.

    `to` names the campaign's key (dotted), or is empty for a setting that another rule reads or that is not
    needed. `read` turns the value; `only` lists values that can be honoured, all where it is None.
    """

    to: str = ""
    read: Callable[[Any], Any] = lambda value: value
    note: str = ""
    only: Sequence[Any] | None = None
    otherwise: str = ""
    """Why another value than those of `only` is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A campaign as read, and the fate of every foreign setting."""

    tree: Tree
    entries: tuple[Entry, ...]
    missing: tuple[str, ...] = field(default=())
    """What the foreign configuration leaves open and a campaign needs, for people."""
    checkpoints: str = ""
    """The folder of the job's checkpoints, which `nereus reshard` reads; empty where unknown."""

    def config(self) -> CampaignConfig:
        """The campaign. Raises pydantic's ValidationError where something is missing or does not fit."""
        return CampaignConfig.model_validate(self.tree)

    def of(self, fate: Fate) -> tuple[Entry, ...]:
        """The settings with one fate."""
        return tuple(entry for entry in self.entries if entry.fate is fate)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested mapping, in order; empty mappings give nothing."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def place(tree: Tree, dotted: str, value: Any) -> None:
    """Set a dotted key of a nested mapping."""
    *path, last = dotted.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value


def place_adapters(tree: Tree, rank: int, alpha: float, targets: Any) -> None:
    """Adapters of LoRA, none for rank 0. Peers call all linear layers `all-linear`, which is the default."""
    if not rank:
        return
    place(tree, "models.lora", {"rank": rank, "alpha": float(alpha)})
    if targets not in (None, "all-linear"):
        place(tree, "models.lora.targets", [targets] if isinstance(targets, str) else list(targets))


def adopt(
    settings: Settings, rules: Mapping[str, Rule], not_needed: Sequence[str]
) -> tuple[Tree, list[Entry]]:
    """Apply the rules. Keys that begin with one of `not_needed` have no counterpart and need none."""
    tree: Tree = {}
    entries = []
    for key, value in settings.items():
        rule = rules.get(key)
        if rule is None:
            known = any(key == name or key.startswith(name + ".") for name in not_needed)
            entries.append(Entry(key=key, value=value, fate=Fate.NOT_NEEDED if known else Fate.UNKNOWN))
        elif rule.only is not None and value not in rule.only:
            entries.append(Entry(key=key, value=value, fate=Fate.UNSUPPORTED, note=rule.otherwise))
        elif not rule.to:
            fate = Fate.MAPPED if rule.note else Fate.NOT_NEEDED
            entries.append(Entry(key=key, value=value, fate=fate, note=rule.note))
        elif value is None:
            entries.append(Entry(key=key, value=value, fate=Fate.NOT_NEEDED, target=rule.to, note="not set"))
        else:
            place(tree, rule.to, rule.read(value))
            entries.append(Entry(key=key, value=value, fate=Fate.MAPPED, target=rule.to, note=rule.note))
    return tree, entries
