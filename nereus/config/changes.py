"""What a person may change of a running campaign, and the campaign's configuration after that. Pure.

changes, step ─▶ validated as a whole configuration ─▶ the configuration from that step on
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator

from nereus.config.adaptation import AdaptationConfig
from nereus.config.campaign import CampaignConfig
from nereus.config.frozen import Frozen
from nereus.config.mistakes import describe_mistakes
from nereus.config.overrides import COMMAND_LINE, apply_overrides, parse_override
from nereus.config.plan import ClusterConfig, PlanChange, PlanConfig
from nereus.errors import ConfigError, explain

LAYOUT = re.compile(r"([a-z]+(?:\.[a-z]+)?)=(tp\d+\s*pp\d+(?:\s*ep\d+)?(?:\s*cp\d+)?)")
STAGES = (
    "actor.training",
    "actor.generation",
    "critic.training",
    "reference.inference",
    "reward.inference",
)


class Changes(Frozen):
    """Changes of a running campaign, from the next step on; what is left empty stays as it is."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of the actor."""
    steps: int | None = Field(default=None, ge=1)
    """Steps in all, those that are done included."""
    max_gpus: int | None = Field(default=None, ge=1)
    """GPUs that the campaign uses at most; it gives back what it has beyond. Needs `adaptation`."""
    plan: PlanConfig | None = None
    """A plan to move to now. A campaign with `adaptation` takes its layouts and units, chooses the GPUs
    itself, and keeps to them from then on.
    """
    forbid: tuple[str, ...] = ()
    """Layouts that the planner leaves out from now on, e.g. `actor.training=tp4pp2`. Needs `adaptation`."""
    free: bool = False
    """Take back every plan that was forced or forbidden before."""

    @field_validator("forbid")
    @classmethod
    def _layouts(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for text in given:
            if LAYOUT.fullmatch(text) is None:
                raise ValueError(
                    f"{text!r} is no layout; write model.stage=tpNppN, e.g. actor.training=tp4pp2"
                )
        return given

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return self == Changes()


def with_changes(config: CampaignConfig, changes: Changes, *, step: int) -> CampaignConfig:
    """The configuration from `step` on. Raises ConfigError where it would not be valid."""
    parts = config.model_dump(mode="json")
    if changes.learning_rate is not None:
        parts["optimizer"]["learning_rate"] = changes.learning_rate
    if changes.steps is not None:
        if changes.steps <= step:
            raise _refused(f"steps = {changes.steps}", f"{step} steps are done; to end the run, cancel it")
        parts["steps"] = changes.steps
        parts["changes"] = [one for one in parts["changes"] if one["before_step"] < changes.steps]
    if changes.max_gpus is not None:
        if config.adaptation is None:
            raise _refused(
                f"max_gpus = {changes.max_gpus}", "only a campaign with `adaptation` gives GPUs back"
            )
        parts["cluster"] = _cluster(config.cluster, changes.max_gpus)
    if config.adaptation is not None:
        parts["adaptation"]["fixed"] = _fixed(config.adaptation, config, changes)
    elif changes.forbid or changes.free:
        raise _refused("forbid or free", "a campaign without `adaptation` moves only where it is told")
    elif changes.plan is not None:
        parts |= _scheduled(config, changes.plan, step)
    try:
        return CampaignConfig.model_validate(parts)
    except ValidationError as error:
        raise _refused(str(changes.model_dump(exclude_defaults=True)), str(error)) from error


def settings(config: CampaignConfig) -> dict[str, Any]:
    """What a configuration says of each thing that can be changed, by the name of the change, as in JSON."""
    adaptation = config.adaptation
    fixed = list(adaptation.fixed) if adaptation else None
    return {
        "learning_rate": config.optimizer.learning_rate,
        "steps": config.steps,
        "max_gpus": config.cluster.max_gpus if adaptation else 0,
        "plan": fixed if adaptation else config.plan.model_dump(mode="json"),
        "forbid": fixed,
        "free": fixed,
    }


def still_meant(changes: Changes, over: Mapping[str, Any], config: CampaignConfig) -> Changes:
    """The changes without those of settings that `config` has otherwise than `over`, the configuration that
    was changed then: who has edited a setting since has spoken last.
    """
    now = settings(config)
    edited = {name for name, value in over.items() if now[name] != value}
    return Changes.model_validate(changes.model_dump(exclude_defaults=True, exclude=edited))


def _cluster(cluster: ClusterConfig, most: int) -> dict[str, object]:
    parts = cluster.model_dump(mode="json")
    return parts | {"max_gpus": most, "gpus": min(cluster.gpus, most)}


def _fixed(adaptation: AdaptationConfig, config: CampaignConfig, changes: Changes) -> list[str]:
    """The planner's choices that are made beforehand, with the forced layouts and without the forbidden."""
    fixed = [] if changes.free else list(adaptation.fixed)
    if changes.plan is not None:
        fixed = [text for text in fixed if ".avoid=" in text]
        for name in (name for name in STAGES if name in config.model_stages):
            stage = changes.plan.stage(name)
            sizes = {"tp": stage.tp, "pp": stage.pp, "dp": stage.dp, "ep": stage.ep, "cp": stage.cp}
            fixed += [f"{name}.{axis}={size}" for axis, size in sizes.items()]
    for text in changes.forbid:
        found = LAYOUT.fullmatch(text)
        assert found is not None, "layouts were validated"
        fixed.append(f"{found[1]}.avoid={''.join(found[2].split())}")
    return list(dict.fromkeys(fixed))


def _scheduled(config: CampaignConfig, plan: PlanConfig, step: int) -> dict[str, object]:
    """A plan as a change before `step`; later ones that were scheduled stay."""
    if step == 0:
        return {"plan": plan.model_dump(mode="json")}
    kept = [change for change in config.changes if change.before_step != step]
    changes = sorted([*kept, PlanChange(before_step=step, plan=plan)], key=lambda one: one.before_step)
    return {"changes": [change.model_dump(mode="json") for change in changes]}


def _refused(values: str, rule: str) -> ConfigError:
    return ConfigError(explain("cannot change the campaign", values=values, rule=rule))


def read_changes(texts: Sequence[str]) -> Changes:
    """Changes from `key=value` texts, typed as in YAML. Raises ConfigError that says what may be given."""
    values = apply_overrides({}, [parse_override(text) for text in texts])
    try:
        return Changes.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error.errors(), lambda key: COMMAND_LINE)) from None
