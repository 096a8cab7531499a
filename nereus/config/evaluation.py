"""When a run is measured on prompts that it does not learn from, and how."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from nereus.config.frozen import BY_KIND, Frozen
from nereus.config.prompts import FileData, PythonData, ReasoningGymData


class EvaluationConfig(Frozen):
    """Answer held-out prompts every so many steps, scored by the campaign's reward. Training does not
    notice.
    """

    source: Annotated[FileData | PythonData | ReasoningGymData, BY_KIND]
    """The held-out prompts; how they become tokens is as under `prompts`."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between evaluations; the last step has one in any case."""
    at_start: bool = True
    """Evaluate before the first step, too."""
    samples: int = Field(default=1, ge=1)
    """Responses a prompt. One is decoded greedily; several are sampled as in training."""
    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k: how likely one of k samples passes."""
    pass_reward: float = 1.0
    """A response passes where its reward is at least this."""

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationConfig:
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(
                f"evaluation.pass_at has {wrong}, but of evaluation.samples = {self.samples} responses a "
                "prompt only 1 to as many can be drawn; raise samples, or leave those out"
            )
        return self
