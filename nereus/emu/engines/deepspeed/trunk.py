"""A Hugging Face decoder without embedding and head, whose parameters are views of our arenas.

The modules are made without memory. DeepSpeed's AutoTP then cuts placeholders that occupy one number each,
and every parameter is bound to its part of the arena: q, k, v and gate, up to their rows of the fused
tensors. A transaction, a weight sync or a checkpoint that writes into the arenas has thus changed the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import PreTrainedModel

from nereus.emu.arena import Arena
from nereus.emu.decoder import DecoderConfig
from nereus.emu.layout import Piece


def make_trunk(config: DecoderConfig, device: torch.device, *, recompute: bool) -> PreTrainedModel:
    """The layers and the last norm, every parameter a placeholder; it reads `inputs_embeds`."""
    settings = config.to_hf()
    shape = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModel.from_config(shape, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    model.embed_tokens = nn.Identity()
    rotary = model.rotary_emb
    with device:
        model.rotary_emb = type(rotary)(shape)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placeholder = nn.Parameter(torch.zeros((), device=device).expand(parameter.shape))
            # Else DeepSpeed broadcasts it, and there is nothing yet.
            placeholder.ds_optim_param = True  # type: ignore[attr-defined]
            setattr(module, name, placeholder)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    return model


class Binding:
    """The trunk's parameters against the arenas: `(parameter, weight, gradient)` for each."""

    def __init__(self, model: nn.Module, theta: Arena, grad: Arena | None) -> None:
        pieces = {piece.logical: piece for piece in theta.shard.pieces}
        self._bound = [
            (name, parameter, *_views(pieces[f"model.{name}"], theta, grad))
            for name, parameter in model.named_parameters()
        ]

    def bind(self) -> None:
        """Make every parameter a view of the weights. Its shape must be the arena's: AutoTP has cut it so."""
        for name, parameter, weight, _ in self._bound:
            assert parameter.shape == weight.shape, f"{name}: {tuple(parameter.shape)} {tuple(weight.shape)}"
            parameter.data = weight

    def bind_gradients(self) -> None:
        """Let gradients gather in the arena, in float32; DeepSpeed drops them after each of its steps."""
        for _, parameter, _, gradient in self._bound:
            if gradient is not None:
                parameter.grad_dtype = torch.float32
                parameter.grad = gradient

    def freeze(self) -> None:
        """No gradients: a model that is only read."""
        for _, parameter, _, _ in self._bound:
            parameter.requires_grad_(False)


def _views(piece: Piece, theta: Arena, grad: Arena | None) -> tuple[Tensor, Tensor | None]:
    return theta.piece(piece), None if grad is None else grad.piece(piece)
