"""Choices that are made beforehand: "tp=4", "actor.training.pp=2", "critic.gpu=A100-80", "avoid=tp8pp1"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from nereus.errors import ConfigError, explain
from nereus.planner.workload import Model, ModelStage, Recompute


class Choice(StrEnum):
    """What can be fixed of a model-stage."""

    TP = "tp"
    PP = "pp"
    DP = "dp"
    EP = "ep"
    CP = "cp"
    GPUS = "gpus"
    GPU = "gpu"
    MICRO_BATCH = "micro_batch"
    RECOMPUTE = "recompute"
    MAX_RESIDENT = "max_resident"
    AVOID = "avoid"
    """A layout that is left out, e.g. `tp4pp2` or `tp1pp2ep4cp2`; several may be."""


_WORDS = (Choice.GPU, Choice.RECOMPUTE, Choice.AVOID)
_CUT = re.compile(r"tp(\d+)\s*pp(\d+)(?:\s*ep(\d+))?(?:\s*cp(\d+))?")

Cut = tuple[int, int, int, int]  # (tp, pp, ep, cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One fixed choice. `scope` is a model-stage, a model (all its stages), or empty (every model-stage)."""

    scope: str
    choice: Choice
    value: int | str

    def __str__(self) -> str:
        return f"{self.scope}{'.' if self.scope else ''}{self.choice}={self.value}"

    @property
    def key(self) -> tuple[str, Choice]:
        """What is fixed, without the value."""
        return self.scope, self.choice

    def covers(self, model_stage: ModelStage) -> bool:
        """Whether the choice is made for this model-stage."""
        return self.scope in ("", model_stage.model, model_stage)


def parse_fix(text: str) -> Fix:
    """Read "[model[.stage].]choice=value". Raises ConfigError that lists what may stand there."""
    what = f"cannot read the fixed choice {text!r}"
    left, equals, value = (part.strip() for part in text.partition("="))
    scope, _, name = left.rpartition(".")
    name = name.replace("-", "_")
    if not equals or not value or name not in [*Choice]:
        raise ConfigError(
            explain(what, rule=f"write [model[.stage].]choice=value with a choice of {', '.join(Choice)}")
        )
    scopes = ["", *Model, *ModelStage]
    if scope not in scopes:
        raise ConfigError(explain(what, rule=f"before the choice stands one of {', '.join(scopes[1:])}"))
    choice = Choice(name)
    if choice in _WORDS:
        if choice is Choice.RECOMPUTE and value not in [*Recompute]:
            raise ConfigError(explain(what, rule=f"recompute is one of {', '.join(Recompute)}"))
        if choice is Choice.AVOID and _CUT.fullmatch(value) is None:
            raise ConfigError(explain(what, rule="avoid names a layout, e.g. tp4pp2"))
        return Fix(scope=scope, choice=choice, value=value)
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(explain(what, rule=f"{choice} is a whole number of at least 1"))
    return Fix(scope=scope, choice=choice, value=int(value))


def parse_fixes(text: str) -> tuple[Fix, ...]:
    """Read several, divided by commas."""
    return tuple(parse_fix(part) for part in text.split(",") if part.strip())


def avoided(fixed: Iterable[Fix], model_stage: ModelStage) -> frozenset[Cut]:
    """The layouts that are left out of a model-stage's; ep and cp are 1 where they are not named."""
    cuts = (
        _CUT.fullmatch(str(fix.value))
        for fix in fixed
        if fix.choice is Choice.AVOID and fix.covers(model_stage)
    )
    return frozenset(
        (int(cut[1]), int(cut[2]), int(cut[3] or 1), int(cut[4] or 1)) for cut in cuts if cut is not None
    )


def chosen(fixed: Iterable[Fix], model_stage: ModelStage, choice: Choice) -> int | str | None:
    """What is fixed for a model-stage; a narrower scope wins. Raises ConfigError for a contradiction."""
    mine = [fix for fix in fixed if fix.choice is choice and fix.covers(model_stage)]
    if not mine:
        return None
    narrow = max(fix.scope.count(".") + bool(fix.scope) for fix in mine)
    values = {fix.value for fix in mine if fix.scope.count(".") + bool(fix.scope) == narrow}
    if len(values) > 1:
        raise ConfigError(
            explain(
                f"{model_stage} has two fixed values of {choice}",
                values=", ".join(map(str, mine)),
                remedy="keep one of them",
            )
        )
    return values.pop()


def chosen_number(fixed: Iterable[Fix], model_stage: ModelStage, choice: Choice) -> int | None:
    """`chosen` for a choice that is a number."""
    value = chosen(fixed, model_stage, choice)
    assert value is None or isinstance(value, int), f"{choice} is a number"
    return value
