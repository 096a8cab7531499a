"""Megatron's names of parameters and ours, for one pipeline stage. Pure."""

from __future__ import annotations

import re

from nereus.emu.decoder import EMBED, FINAL_NORM

OF_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # Transformer Engine fuses it
    "self_attention.linear_qkv.weight": "self_attn.qkv_proj.weight",
    "self_attention.linear_qkv.bias": "self_attn.qkv_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def physical_name(megatron: str, *, first_layer: int, head: str) -> str:
    """The physical tensor of a parameter, `head` being that of `output_layer`. Raises KeyError for others."""
    if found := _LAYER.fullmatch(megatron):
        return f"model.layers.{first_layer + int(found[1])}.{OF_LAYER[found[2]]}"
    return {
        "embedding.word_embeddings.weight": EMBED,
        "decoder.final_layernorm.weight": FINAL_NORM,
        "output_layer.weight": head,
    }[megatron]
