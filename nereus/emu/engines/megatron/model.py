"""Megatron's GPTModel of one pipeline stage whose parameters are views of our arenas.

The model is made without memory and each parameter is then bound to its physical tensor, whose storage
order is Megatron's (qkv by kv group, gate beside up, equal parts of a padded vocabulary). A transaction, a
weight sync or a checkpoint that writes into the arenas has thus changed the model, and its gradients land
in an arena, too.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nereus.emu.arena import TORCH_DTYPE, Arena
from nereus.emu.decoder import EMBED, HEAD, VALUE_HEAD, DecoderConfig
from nereus.emu.engines.megatron.names import physical_name
from nereus.emu.engines.torch.rope import inverse_frequencies
from nereus.emu.layout import Layout, Position
from nereus.emu.tensor import Vocab


class HiddenStates(nn.Module):
    """Stands for the output layer: holds its weight and hands the hidden states on.

    Logits of a whole micro-batch are never made: the head works on the scored places alone, chunk by chunk.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(
        self, hidden_sbh: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The hidden states as they are, in the shape that GPTModel expects of an output layer."""
        return hidden_sbh, None


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: it needs CUDA."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def transformer_config(
    config: DecoderConfig, layout: Layout, device: torch.device, *, recompute: bool
) -> TransformerConfig:
    """Megatron's settings of a decoder under a layout."""
    dtype = TORCH_DTYPE[config.dtype]
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=config.dtype == "bf16",
        fp16=config.dtype == "fp16",
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        perform_initialization=False,
        init_model_with_meta_device=True,
        variable_seq_lengths=True,  # micro-batches differ in shape
        moe_token_dispatcher_type="alltoall",  # the default refuses that, experts or none
        calculate_per_token_loss=True,  # losses are shares of the global one: nothing is divided
        batch_p2p_sync=device.type == "cuda",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(again if recompute else {}),
    )


def stage_model(
    config: DecoderConfig,
    settings: TransformerConfig,
    layout: Layout,
    position: Position,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> GPTModel:
    """The modules of one stage, without memory. Call within `MegatronProcess.entered(building=True)`."""
    is_last = position.pp == layout.pp - 1
    vocab_stored = Vocab().stored_rows(config.vocab_size, layout.tp)
    layer, norm = _layer_spec(config, device)
    model = GPTModel(
        settings,
        TransformerBlockSubmodules(layer_specs=[layer] * layout.layers[position.pp], layer_norm=norm),
        vocab_size=vocab_stored * layout.tp,
        max_sequence_length=config.max_positions,
        pre_process=position.pp == 0,
        post_process=is_last,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    if is_last:
        width = config.hidden_size
        shape = (1, width) if config.head == "value" else (vocab_stored, width)
        model.output_layer = HiddenStates(torch.empty(shape, device="meta"))
    # One definition of the frequencies serves every engine and every kind of rescaling.
    with torch.device("cpu"):
        model.rotary_pos_emb.inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
    return model


def _layer_spec(config: DecoderConfig, device: torch.device) -> tuple[ModuleSpec, type]:
    if uses_transformer_engine(device):
        from megatron.core.extensions.transformer_engine import TENorm

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_norm), TENorm
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    return spec, WrappedTorchNorm


def head_name(config: DecoderConfig) -> str:
    """The physical tensor of the output layer: a tied head is the embedding."""
    if config.head == "value":
        return VALUE_HEAD
    return EMBED if config.tied else HEAD


def bind(
    model: GPTModel,
    config: DecoderConfig,
    layout: Layout,
    position: Position,
    theta: Arena,
    grad: Arena | None,
) -> None:
    """Make every parameter a view of `theta`, with its gradient a view of `grad` (float32).

    Parameters of one physical tensor (a tied embedding on one stage) become one parameter.
    """
    first_layer = layout.split[position.pp][0]
    bound: dict[str, nn.Parameter] = {}
    for name, made in list(model.named_parameters(remove_duplicate=False)):
        physical = physical_name(name, first_layer=first_layer, head=head_name(config))
        view = theta[physical]
        assert view.shape == made.shape, f"{name} is {tuple(made.shape)}, {physical} {tuple(view.shape)}"
        if physical not in bound:
            bound[physical] = _parameter(view, None if grad is None else grad[physical])
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, bound[physical])
    absent = set(theta.views) - set(bound)
    assert not absent, f"no parameter stands for {sorted(absent)}"


def _parameter(view: Tensor, grad: Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(view.detach(), requires_grad=grad is not None)
    if grad is not None:
        parameter.grad_dtype = torch.float32  # half-precision weights gather their gradients in float32
        parameter.grad = grad
    return parameter
