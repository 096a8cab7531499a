"""Which engine trains and which one generates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nereus.config.frozen import Frozen

TrainingEngine = Literal["torch", "megatron", "deepspeed"]
GenerationEngine = Literal["torch", "vllm"]


class VllmConfig(Frozen):
    """Settings of vLLM's engines, one in each worker that generates; for `engines.generation: vllm`."""

    kv_cache_gb: float | None = Field(default=None, gt=0)
    """KV cache of one worker, GB (10^9 bytes), allocated for as long as the engine lives. Absent: room for
    `max_sequences` of full length, at most 1.07 GB on a CPU, half of what is free on a GPU. One sequence of
    full length always fits."""
    max_sequences: int = Field(default=256, ge=1)
    """Sequences that run at once on a unit; others wait for a place."""
    eager: bool | None = None
    """Run without compiled graphs: engines are made in a fraction of the time and generate slower on GPUs.
    Absent: eager on CPUs, graphs on GPUs."""


class EnginesConfig(Frozen):
    """The engines of the model-stages. `torch` is built in; each other one is an extra of the same name."""

    training: TrainingEngine = "torch"
    """Trains the actor and the critic."""
    generation: GenerationEngine = "torch"
    """Answers the prompts."""
    old_logprobs: Literal["auto", "generation", "training"] = "auto"
    """Whose log-probabilities of the sampled tokens the policy's ratio starts from: those that generation
    returned, or those of a forward pass of the training engine. `auto` takes generation's where both engines
    are one, else training's: other kernels give other last digits. With `correction` there is always such a
    pass."""
    vllm: VllmConfig = VllmConfig()
    """vLLM's engines."""

    @property
    def rescores(self) -> bool:
        """Whether the training engine computes the old log-probabilities."""
        if self.old_logprobs == "auto":
            return self.generation != self.training
        return self.old_logprobs == "training"
