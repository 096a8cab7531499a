"""Whether generation runs ahead of training, and how far."""

from __future__ import annotations

from pydantic import Field, model_validator

from nereus.config.frozen import Frozen


class AsynchronyConfig(Frozen):
    """Generation in its own right, on GPUs of its own, ahead of training by a bounded number of steps."""

    staleness: int = Field(default=1, ge=0)
    """Steps that the policy which draws a step's first tokens may be behind the one that learns from them. 1:
    one step off, the next step's responses are drawn while this one learns. 0: in turn, as without
    asynchrony.
    """
    segment_tokens: int | None = Field(default=None, ge=1)
    """A weight sync may come after every so many tokens of the responses, which the newer policy then goes on
    with (partial rollouts); null: it waits until the responses of a step are whole.
    """

    @model_validator(mode="after")
    def _segments_have_a_use(self) -> AsynchronyConfig:
        if self.segment_tokens is not None and self.staleness == 0:
            raise ValueError(
                f"segment_tokens = {self.segment_tokens} with staleness = 0: no weight sync comes while "
                "responses are drawn; raise staleness, or leave segment_tokens out"
            )
        return self
