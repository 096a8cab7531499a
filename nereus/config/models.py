"""Which models a campaign trains and consults."""

from __future__ import annotations

from enum import StrEnum

from nereus.config.frozen import Frozen
from nereus.config.paths import InputPath


class Precision(StrEnum):
    """Dtype of weights. Half precision keeps an fp32 master copy; gradients and moments are fp32 always."""

    fp32 = "fp32"
    bf16 = "bf16"


class ModelsConfig(Frozen):
    """Folders of the models, in Hugging Face form (config.json, *.safetensors, tokenizer files)."""

    actor: InputPath
    """The policy to train."""
    critic: InputPath | None = None
    """The critic's initial trunk; the actor's when absent. Only PPO has a critic."""
    reference: InputPath | None = None
    """The frozen reference policy; the actor's initial weights when absent. Used only with a KL term."""
    tokenizer: InputPath | None = None
    """Folder of the tokenizer; the actor's when absent."""
    precision: Precision = Precision.fp32
    """Dtype of all models' weights."""
    recompute: bool = False
    """Recompute activations in the backward pass: a third more work, far less memory."""
