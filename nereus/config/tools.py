"""Tools that the policy may use while it answers."""

from __future__ import annotations

from pydantic import Field, model_validator

from nereus.config.frozen import Frozen
from nereus.config.paths import FunctionPath


class ToolsConfig(Frozen):
    """A function that is called after each of the model's turns and says what the model reads next."""

    function: FunctionPath
    """`package.module:function` or `path/to/file.py:function`. It gets the turn as text and returns what the
    model reads next, or None to end the response.
    """
    max_turns: int = Field(default=4, ge=2)
    """Turns of the model in one response; after the last one the function is not called."""
    max_observation_tokens: int = Field(default=256, ge=1)
    """Tokens of one observation; what is beyond is cut off. They count in `sampling.max_new_tokens`."""
    template: str = "{observation}"
    """What stands around an observation, e.g. the chat template's marks of a tool's turn and of the model's
    next one. Special tokens may be written out.
    """
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call, seconds. The model then reads `error: timeout`."""
    workers: int | None = Field(default=None, ge=1)
    """Number of tool processes; null: as many as keep calls from waiting, chosen between steps from what was
    measured.
    """

    @model_validator(mode="after")
    def _has_a_place(self) -> ToolsConfig:
        if self.template.count("{observation}") != 1:
            raise ValueError(
                f"tools.template = {self.template!r} has {self.template.count('{observation}')} places for "
                "the observation; write {observation} once"
            )
        return self
