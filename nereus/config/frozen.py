"""The base of the configuration tree: frozen, unknown keys refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """Base of the tree: frozen, no unknown keys, defaults validated too, every number finite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def _as_tabs(schema: dict[str, Any]) -> None:
    """Say `anyOf`, which the Prefect UI shows as tabs; pydantic's tagged `oneOf` it shows as raw JSON."""
    schema["anyOf"] = schema.pop("oneOf")
    del schema["discriminator"]


BY_KIND: Any = Field(discriminator="kind", json_schema_extra=_as_tabs)
"""Marks a union of models that `kind` tells apart."""
