"""What keys the configuration tree has, and which known key an unknown one resembles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nereus.config.campaign import CampaignConfig

# What the same thing is called in other trainers and in daily speech.
OTHER_NAMES = {
    "lr": "learning_rate",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "num_generations": "samples",
    "rollout_n": "samples",
    "group_size": "samples",
    "batch_size": "prompts",
    "train_batch_size": "prompts",
    "max_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_grad_norm": "max_gradient_norm",
    "num_gpus": "gpus",
    "model": "actor",
    "max_steps": "steps",
    "kl_coef": "coefficient",
    "kl_loss_coef": "coefficient",
    "init_kl_coef": "coefficient",
    "kl_penalty": "estimator",
    "kl_target": "target",
    "kl_horizon": "horizon_rows",
    "cliprange": "clip_high",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "entropy_coeff": "entropy",
    "entropy_coef": "entropy",
    "loss_agg_mode": "aggregation",
    "loss_type": "kind",
    "adv_estimator": "kind",
    "scale_rewards": "normalize_std",
    "norm_adv_by_std_in_grpo": "normalize_std",
    "max_num_gen_batches": "max_batches",
    "overlong_buffer_len": "overlong_share",
    "rollout_is": "weight",
    "rollout_is_threshold": "high",
    "rollout_rs": "rejection",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A key of the tree; alternatives of a union give one each."""

    path: tuple[str, ...]
    field: FieldInfo
    kind: str | None
    """The `kind` of the alternative that has the key; None where there are no alternatives."""

    @property
    def dotted(self) -> str:
        """E.g. `optimizer.learning_rate`."""
        return ".".join(self.path)


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models that a field's annotation admits: through unions, `| None` and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in models_in(part))


def has_mark(field: FieldInfo, mark: type) -> bool:
    """Whether the field is annotated with an instance of `mark`, at any depth."""

    def inside(annotation: Any) -> bool:
        return any(isinstance(part, mark) or inside(part) for part in get_args(annotation))

    metadata: Sequence[object] = field.metadata
    return any(isinstance(part, mark) for part in metadata) or inside(field.annotation)


@cache
def known_keys() -> tuple[KnownKey, ...]:
    """Every key of the tree, parents before children."""

    def walk(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[KnownKey]:
        for name, field in model.model_fields.items():
            yield KnownKey(path=(*path, name), field=field, kind=_kind(model))
            for part in models_in(field.annotation):
                yield from walk(part, (*path, name))

    return tuple(walk(CampaignConfig, ()))


def without_tags(loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """The key path of a pydantic error location: the tags that pydantic adds for unions are taken out."""
    path: list[str | int] = []
    models: tuple[type[BaseModel], ...] = (CampaignConfig,)
    for part in loc:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if fields:
            models = tuple(model for field in fields for model in models_in(field.annotation))
            path.append(str(part))
        elif tagged := tuple(model for model in models if part in _tags(model)):
            models = tagged
        else:
            path.append(part)
    return tuple(path)


def nearest_keys(path: Sequence[str | int], *, limit: int = 3) -> tuple[str, ...]:
    """The known keys that an unknown one most resembles, best first, at most `limit`; perhaps none.

    The whole tree is searched: a sibling that is nearly the same comes first, then the same name elsewhere
    (or what other trainers call it), then a sibling somewhat alike, then a similar name elsewhere.
    """
    *parent, last = (part for part in path if isinstance(part, str))
    word = last.lower().replace("-", "_")
    scores: dict[str, float] = {}
    for key in known_keys():
        name = key.path[-1]
        alike = SequenceMatcher(None, word, name).ratio()
        sibling = key.path[:-1] == tuple(parent)
        if sibling and alike >= 0.8:
            score = 4 + alike
        elif name in (word, OTHER_NAMES.get(word)):
            score = 3 + sibling
        elif sibling and alike >= 0.6:
            score = 2 + alike
        elif alike >= 0.75:
            score = 1 + alike
        else:
            continue
        scores[key.dotted] = max(scores.get(key.dotted, 0.0), score)
    ranked = sorted(scores, key=lambda dotted: -scores[dotted])
    best = int(scores[ranked[0]]) if ranked else 0
    return tuple(dotted for dotted in ranked if int(scores[dotted]) == best)[: 1 if best == 4 else limit]


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    """What pydantic may call this alternative of a union in a location."""
    kind = _kind(model)
    return (model.__name__,) if kind is None else (model.__name__, kind)


def _kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)
