"""Which engine trains and which one generates."""

from __future__ import annotations

from typing import Literal

from nereus.config.frozen import Frozen

TrainingEngine = Literal["torch", "megatron", "deepspeed"]
GenerationEngine = Literal["torch", "vllm"]


class EnginesConfig(Frozen):
    """The engines of the model-stages. `torch` is built in; each other one is an extra of the same name."""

    training: TrainingEngine = "torch"
    """Trains the actor and the critic."""
    generation: GenerationEngine = "torch"
    """Answers the prompts."""
