"""The batch of a step, the optimizer, and how the policy is sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nereus.config.frozen import Frozen


class BatchConfig(Frozen):
    """How many prompts and rows a step has, and how they are cut for the optimizer."""

    prompts: int = Field(default=8, ge=1)
    """Prompts a step."""
    samples: int = Field(default=8, ge=1)
    """Responses a prompt."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's rows."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass."""
    micro_batch_rows: int = Field(default=8, ge=1)
    """Rows of one forward and backward pass on one unit."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward and backward pass on one unit, whatever the rows, in place of
    `micro_batch_rows`: passes are then about equally full whatever the lengths. A row with more tokens is
    taken alone.
    """


class OptimizerConfig(Frozen):
    """AdamW with gradient clipping."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """The actor's learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up, down to zero at the last step for cosine and linear."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Clip of the global gradient norm; null does not clip."""
    zero1: bool = False
    """Let the units (data-parallel replicas) of a trained model share its optimizer state, a slice each, as
    ZeRO stage 1 does: of the 18 bytes a parameter in bf16 12 are divided by their number, of the 16 in fp32
    8. When a unit dies its slice is gone, and the job goes back to the newest checkpoint or peer copy. This
    does not change while a job runs.
    """


class SamplingConfig(Frozen):
    """How the policy answers."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; scoring and training use it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the distribution that is sampled from."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among the so many most likely tokens, and from the nucleus of what they share; null: all."""
    max_rows: int | None = Field(default=None, ge=1)
    """Rows that a unit of the torch engine decodes at once; others enter as rows end, on whichever unit has
    room. Null: all of a unit's share at once, unless the planner says otherwise.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Let the model's own end-of-sequence tokens end nothing, so that responses have a fixed length."""
