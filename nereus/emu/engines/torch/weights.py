"""One stage's weights on one rank: views of an arena, by role.

`covered` cuts the vocabulary's pad rows off each view, so padding takes part in no product, no softmax and no
gradient; the views are otherwise the arena's storage, and a write into the arena is at once a new weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.arena import Arena
from nereus.emu.decoder import EMBED, FINAL_NORM, HEAD, ROUTER, VALUE_HEAD, DecoderConfig
from nereus.emu.engines.torch.adapters import Adapter, adapter_of
from nereus.emu.engines.torch.experts import NO_GROUP, ExpertGroup, ExpertWeights
from nereus.emu.layout import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapters:
    """The adapters of one layer's stored weights on this rank; None where none of it is a target."""

    qkv: Adapter | None = None
    out: Adapter | None = None
    gate_up: Adapter | None = None
    down: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer on this rank: `num_query` query heads and `num_kv` key-value heads of it.

    The feed-forward part is `gate_up` and `down`, or `experts`.
    """

    num_query: int
    num_kv: int
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    experts: ExpertWeights | None = None
    adapters: LayerAdapters = LayerAdapters()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """One pipeline stage on this rank, and the tensor-parallel group its products are summed over.

    `vocab` is the interval of token ids whose rows `embed` and `head` hold here; every position of the
    tensor-parallel axis stores `vocab_stored` rows, pad rows included.
    """

    config: DecoderConfig
    layers: tuple[LayerWeights, ...]
    vocab: tuple[int, int]
    vocab_stored: int
    embed: Tensor | None
    norm: Tensor | None
    head: Tensor | None
    score: Tensor | None
    tp: ProcessGroup | None
    ep: ExpertGroup = NO_GROUP


def covered(arena: Arena) -> dict[str, Tensor]:
    """Each physical tensor of the arena without the rows that no piece covers."""
    rows: dict[str, int] = {}
    for piece in arena.shard.pieces:
        rows[piece.physical] = max(rows.get(piece.physical, 0), piece.stored[0][1])
    return {name: arena[name][: rows.get(name, 0)] for name in arena}


def leaves(theta: Arena, grad: Arena) -> dict[str, Tensor]:
    """Covered weights as autograd leaves whose gradients accumulate into the views of `grad` (float32)."""
    gradients = covered(grad)
    out: dict[str, Tensor] = {}
    for name, view in covered(theta).items():
        leaf = view.detach().requires_grad_()
        leaf.grad_dtype = torch.float32  # half-precision weights gather their gradients in float32
        leaf.grad = gradients[name]
        out[name] = leaf
    return out


def without_adapters(stage: StageWeights) -> StageWeights:
    """The frozen weights alone."""
    return replace(stage, layers=tuple(replace(layer, adapters=LayerAdapters()) for layer in stage.layers))


def stage_weights(
    config: DecoderConfig,
    shard: Shard,
    views: Mapping[str, Tensor],
    tp: ProcessGroup | None,
    ep: ExpertGroup = NO_GROUP,
) -> StageWeights:
    """Arrange the views of one shard (from `covered` or `leaves`) by role."""
    numbers = sorted({int(name.split(".")[2]) for name in views if name.startswith("model.layers.")})
    intervals = [p.box[0] for p in shard.pieces if p.logical in (EMBED, HEAD)]
    stored = [t.shape[0] for t in shard.tensors if t.name in (EMBED, HEAD)]
    is_last = FINAL_NORM in views
    return StageWeights(
        config=config,
        layers=tuple(_layer(config, views, f"model.layers.{number}.") for number in numbers),
        vocab=intervals[0] if intervals else (0, 0),
        vocab_stored=stored[0] if stored else 0,
        embed=views[EMBED] if shard.position.pp == 0 else None,
        norm=views.get(FINAL_NORM),
        # Tied weights: the last stage holds the embedding's rows, once more when it is not the first stage.
        head=views.get(HEAD, views.get(EMBED)) if is_last and config.head == "lm" else None,
        score=views.get(VALUE_HEAD),
        tp=tp,
        ep=ep,
    )


def _layer(config: DecoderConfig, views: Mapping[str, Tensor], at: str) -> LayerWeights:
    qkv, out = views[at + "self_attn.qkv_proj.weight"], views[at + "self_attn.o_proj.weight"]
    gate_up = views.get(at + "mlp.gate_up_proj.weight")
    num_query = out.shape[1] // config.head_dim
    num_kv = (qkv.shape[0] // config.head_dim - num_query) // 2
    return LayerWeights(
        num_query=num_query,
        num_kv=num_kv,
        input_norm=views[at + "input_layernorm.weight"],
        qkv=qkv,
        qkv_bias=views.get(at + "self_attn.qkv_proj.bias"),
        q_norm=views.get(at + "self_attn.q_norm.weight"),
        k_norm=views.get(at + "self_attn.k_norm.weight"),
        out=out,
        out_bias=views.get(at + "self_attn.o_proj.bias"),
        post_norm=views[at + "post_attention_layernorm.weight"],
        gate_up=gate_up,
        down=views.get(at + "mlp.down_proj.weight"),
        experts=None if config.experts is None else _experts(views, at),
        adapters=_adapters(
            config, views, at, (num_query, num_kv), 0 if gate_up is None else gate_up.shape[0] // 2
        ),
    )


def _experts(views: Mapping[str, Tensor], at: str) -> ExpertWeights:
    return ExpertWeights(
        router=views[at + ROUTER],
        gate=views[at + "mlp.experts.gate_proj.weight"],
        up=views[at + "mlp.experts.up_proj.weight"],
        down=views[at + "mlp.experts.down_proj.weight"],
    )


def _adapters(
    config: DecoderConfig, views: Mapping[str, Tensor], at: str, heads: tuple[int, int], width: int
) -> LayerAdapters:
    """The adapters of a layer with so many query and key-value heads and feed-forward columns here."""
    if config.lora is None:
        return LayerAdapters()

    def of(weight: str, **rows: int) -> Adapter | None:
        parts = [(f"{at}{weight.partition('.')[0]}.{name}.weight", num) for name, num in rows.items()]
        return adapter_of(views, config.lora, at + weight, parts)

    query, kv = (num * config.head_dim for num in heads)
    hidden = config.hidden_size
    return LayerAdapters(
        qkv=of("self_attn.qkv_proj.weight", q_proj=query, k_proj=kv, v_proj=kv),
        out=of("self_attn.o_proj.weight", o_proj=hidden),
        gate_up=of("mlp.gate_up_proj.weight", gate_proj=width, up_proj=width),
        down=of("mlp.down_proj.weight", down_proj=hidden),
    )
