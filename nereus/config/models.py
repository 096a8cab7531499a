"""Which models a campaign trains and consults."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from nereus.config.frozen import Frozen
from nereus.config.paths import InputPath


class Precision(StrEnum):
    """Dtype of weights. Half precision keeps an fp32 master copy; gradients and moments are fp32 always.

    In fp16 training and generation agree better than in bf16; the loss is scaled, as its range asks for.
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class LoraTarget(StrEnum):
    """A linear layer that adapters can be put on."""

    q_proj = "q_proj"
    k_proj = "k_proj"
    v_proj = "v_proj"
    o_proj = "o_proj"
    gate_proj = "gate_proj"
    up_proj = "up_proj"
    down_proj = "down_proj"


class LoraConfig(Frozen):
    """Low-rank adapters: a target weight W counts as W + alpha / rank * B A; only A and B are trained."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = Field(default=tuple(LoraTarget), min_length=1)
    """The layers that get adapters."""
    adapter: InputPath | None = None
    """Folder, in PEFT's form, of the adapter that the actor starts from, with this rank, alpha and these
    targets. Fresh ones, which change nothing yet, when absent."""


class ModelsConfig(Frozen):
    """Folders of the models, in Hugging Face form (config.json, *.safetensors, tokenizer files)."""

    actor: InputPath
    """The policy to train."""
    critic: InputPath | None = None
    """The critic's initial trunk; the actor's when absent. Only PPO has a critic."""
    reference: InputPath | None = None
    """The frozen reference policy; the actor's initial weights when absent, with `lora` the actor without its
    adapters, scored in place. Used only with a KL term."""
    tokenizer: InputPath | None = None
    """Folder of the tokenizer; the actor's when absent."""
    precision: Precision = Precision.fp32
    """Dtype of all models' weights."""
    lora: LoraConfig | None = None
    """Train adapters beside frozen weights, for the actor and the critic (and its value head). Gradients and
    optimizer state are then of the adapters alone. All weights are trained when absent."""
    recompute: bool = False
    """Recompute activations in the backward pass: a third more work, far less memory."""
    router_balance: float = Field(default=0.0, ge=0.0)
    """Coefficient of the loss that evens the load of a mixture's experts in training (Switch Transformer, a
    layer at a time, over the tokens of a micro-batch); 0 leaves it out.
    """
