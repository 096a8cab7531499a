"""The shape of a Llama-style decoder, dense or of experts, from a Hugging Face `config.json`, old or new.

Pure: the planner reads it too, so nothing here may load torch. `decoder_spec` turns the shape into the
logical tensors (Hugging Face names, unfused, unpadded) and the fused rules that the torch engine stores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nereus.emu.lora import VALUE_HEAD as VALUE_HEAD
from nereus.emu.lora import Lora, adapter_tensors
from nereus.emu.tensor import Cut, Even, Fused, KvHeads, ModelSpec, Replicated, TensorSpec, Vocab
from nereus.errors import ModelError, explain

Head = Literal["lm", "value"]
DType = Literal["bf16", "fp16", "fp32"]

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
SUPPORTED: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
_DTYPES: Mapping[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ARCHITECTURE: Mapping[Family, str] = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: base `theta` and, for `llama3` and `linear`, the rescaling of frequencies."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """Read `rope_parameters` (new dialect) or `rope_theta` and `rope_scaling` (published checkpoints).

        Raises ModelError for a rope type that is not one of default, linear, llama3.
        """
        modern = config.get("rope_parameters")
        scaling: Mapping[str, Any] = modern or config.get("rope_scaling") or {}
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ModelError(
                explain(
                    "cannot read the rotary embedding",
                    values=f"rope_type={kind!r}",
                    rule="known types are default, linear and llama3",
                    remedy="use a checkpoint of one of these types",
                )
            )
        return cls(
            theta=float(theta),
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_max_positions=int(
                scaling.get("original_max_position_embeddings", config.get("max_position_embeddings", 8192))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward part of a mixture: `num` experts of the decoder's intermediate width in every layer.

    A token visits the `per_token` likeliest of a softmax over all; with `normalized` their weights are
    divided by their sum.
    """

    num: int
    per_token: int
    normalized: bool = True

    @classmethod
    def from_hf(cls, family: Family, config: Mapping[str, Any]) -> Experts | None:
        """Read what a Mixtral or Qwen3-MoE config says; None for a dense family.

        Raises ModelError where a layer has no experts, or a token visits more experts than there are.
        """
        if family not in ("qwen3_moe", "mixtral"):
            return None
        if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step", 1)) != 1:
            raise ModelError(
                explain(
                    "cannot read the model's config",
                    values=f"mlp_only_layers={config.get('mlp_only_layers')} "
                    f"decoder_sparse_step={config.get('decoder_sparse_step')}",
                    rule="every layer must be a mixture of experts",
                    remedy="use a checkpoint without dense layers",
                )
            )
        num = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        per_token = int(config.get("num_experts_per_tok") or 0)
        if not 1 <= per_token <= num:
            raise ModelError(
                explain(
                    "cannot read the model's config",
                    values=f"{num} experts, {per_token} for a token",
                    rule="a token visits at least one expert and at most all",
                )
            )
        # Mixtral always divides by the sum; Qwen3-MoE does where the flag says so.
        return cls(
            num=num,
            per_token=per_token,
            normalized=family == "mixtral" or bool(config.get("norm_topk_prob", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """All that the engine and the planner need to know of a decoder with grouped-query attention.

    With `experts` the decoder is a mixture and `intermediate_size` is the width of one expert.
    """

    family: Family = "llama"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    experts: Experts | None = None
    tied: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    max_positions: int = 2048
    rope: Rope = Rope()
    dtype: DType = "fp32"
    head: Head = "lm"
    lora: Lora | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, qkv_bias: bool | None = None) -> DecoderConfig:
        """Build from the mapping of a `config.json`.

        `qkv_bias` overrides the family's convention (Qwen2 has the bias and no flag for it).
        Raises ModelError for an unknown `model_type`, a missing field, or an activation other than SiLU.
        """
        family = config.get("model_type")
        if family not in SUPPORTED:
            raise ModelError(
                explain(
                    "cannot read the model's config",
                    values=f"model_type={family!r}",
                    rule=f"supported model types are {', '.join(SUPPORTED)}",
                    remedy="use a Llama, Qwen2/2.5, Qwen3, Qwen3-MoE or Mixtral checkpoint",
                )
            )
        required = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size",
        )
        missing = [key for key in required if key not in config]
        if missing:
            raise ModelError(
                explain(
                    "cannot read the model's config",
                    values=f"missing {', '.join(missing)}",
                    rule="all are required",
                )
            )
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelError(
                explain(
                    "cannot read the model's config",
                    values=f"hidden_act={activation!r}",
                    rule="only silu is supported",
                )
            )
        slides = config.get("sliding_window") if family == "mixtral" else config.get("use_sliding_window")
        if slides or "sliding_attention" in (config.get("layer_types") or ()):
            raise ModelError(
                explain(
                    "cannot read the model's config",
                    values="some of its layers attend to a sliding window",
                    rule="every layer must attend to all earlier tokens",
                    remedy="use a checkpoint with full attention (use_sliding_window: false)",
                )
            )
        heads = int(config["num_attention_heads"])
        eos = config.get("eos_token_id")
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            intermediate_size=int(config[required[-1]]),
            experts=Experts.from_hf(family, config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=(family == "qwen2" or attention_bias) if qkv_bias is None else qkv_bias,
            attention_out_bias=attention_bias and family != "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            rope=Rope.from_hf(config),
            dtype=_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), "fp32"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            pad_token_id=config.get("pad_token_id"),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read `folder/config.json`. Raises ModelError when it is absent or is not JSON."""
        path = Path(folder) / "config.json"
        try:
            return cls.from_hf(json.loads(path.read_text()))
        except FileNotFoundError:
            raise ModelError(
                explain(
                    f"cannot load the model folder {folder}",
                    values="config.json is absent",
                    rule="a Hugging Face folder holds config.json and *.safetensors",
                    remedy="give the path of such a folder",
                )
            ) from None
        except json.JSONDecodeError as error:
            raise ModelError(
                explain(f"cannot read {path}", values=str(error), rule="it must be JSON")
            ) from error

    def with_head(self, head: Head) -> DecoderConfig:
        """The same trunk with a language-model head or a scalar value head (critic, reward)."""
        return replace(self, head=head)

    def with_dtype(self, dtype: DType) -> DecoderConfig:
        """The same model with weights in another dtype."""
        return replace(self, dtype=dtype)

    def with_lora(self, lora: Lora | None) -> DecoderConfig:
        """The same model with frozen weights and adapters beside them, or without adapters."""
        return replace(self, lora=lora)

    @property
    def num_parameters(self) -> int:
        """Number of distinct logical weights, adapters too (tied embeddings counted once)."""
        return decoder_spec(self).num_elements

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` in the dialect of published checkpoints, which every reader accepts."""
        names: dict[DType, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        kind = "ForCausalLM" if self.head == "lm" else "ForTokenClassification"
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURE[self.family] + kind],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "rope_theta": self.rope.theta,
            "torch_dtype": names[self.dtype],
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) > 1
            else next(iter(self.eos_token_ids), None),
            "pad_token_id": self.pad_token_id,
        }
        if self.family not in ("qwen2", "mixtral"):
            out["attention_bias"] = self.qkv_bias
        if self.experts is not None:
            out |= self._experts_to_hf(self.experts)
        if self.family == "llama":
            out["mlp_bias"] = False
        if self.head == "value":
            out["num_labels"] = 1
        if self.rope.kind != "default":
            out["rope_scaling"] = {"rope_type": self.rope.kind, "factor": self.rope.factor}
            if self.rope.kind == "llama3":
                out["rope_scaling"] |= {
                    "low_freq_factor": self.rope.low_freq_factor,
                    "high_freq_factor": self.rope.high_freq_factor,
                    "original_max_position_embeddings": self.rope.original_max_positions,
                }
        return out

    def _experts_to_hf(self, experts: Experts) -> dict[str, Any]:
        out: dict[str, Any] = {"num_experts_per_tok": experts.per_token, "output_router_logits": False}
        if self.family == "mixtral":
            return out | {"num_local_experts": experts.num, "sliding_window": None}
        return out | {
            "num_experts": experts.num,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": experts.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


EMBED = "model.embed_tokens.weight"
ROUTER = "mlp.gate.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


def decoder_spec(
    config: DecoderConfig,
    *,
    vocab_multiple: int = 1,
    qkv_order: Literal["blocks", "per_kv_group"] = "blocks",
) -> ModelSpec:
    """The logical tensors of the decoder and how an engine stores them; the default is the torch engine's
    way.

    q, k, v (and their biases) are stored fused in `qkv_order`, gate and up in blocks; the vocabulary is
    padded up to a multiple of `vocab_multiple * tp` rows. The experts of a layer are three tensors whose dim
    0 counts them, stored as they are. With a value head there is no `lm_head` and nothing is tied. Adapters
    come last.
    """
    h, d, kv = config.hidden_size, config.head_dim, config.num_kv_heads
    group = config.num_heads // kv
    query: Cut = KvHeads(dim=0, num_kv_heads=kv, rows_per_head=group * d, split_group=group)
    key: Cut = KvHeads(dim=0, num_kv_heads=kv, rows_per_head=d)
    out: Cut = KvHeads(dim=1, num_kv_heads=kv, rows_per_head=group * d, split_group=group)
    whole, rows, cols = Replicated(), Even(dim=0), Even(dim=1)
    tied = config.tied and config.head == "lm"
    vocab = Vocab(dim=0, multiple=vocab_multiple)
    tensors = [
        TensorSpec(
            name=EMBED, shape=(config.vocab_size, h), cut=vocab, place="first", also="last" if tied else None
        )
    ]
    fused: list[Fused] = []
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."

        def add(
            name: str,
            shape: tuple[int, ...],
            cut: Cut,
            at: str = at,
            layer: int = layer,
            experts: bool = False,
        ) -> None:
            tensors.append(TensorSpec(name=at + name, shape=shape, cut=cut, place=layer, experts=experts))

        add("input_layernorm.weight", (h,), whole)
        for letter, heads, cut in (("q", config.num_heads, query), ("k", kv, key), ("v", kv, key)):
            add(f"self_attn.{letter}_proj.weight", (heads * d, h), cut)
            if config.qkv_bias:
                add(f"self_attn.{letter}_proj.bias", (heads * d,), cut)
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = tuple(f"{at}self_attn.{letter}_proj.{kind}" for letter in "qkv")
            fused.append(Fused(name=f"{at}self_attn.qkv_proj.{kind}", parts=parts, order=qkv_order))
        if config.qk_norm:
            add("self_attn.q_norm.weight", (d,), whole)
            add("self_attn.k_norm.weight", (d,), whole)
        add("self_attn.o_proj.weight", (h, config.num_heads * d), out)
        if config.attention_out_bias:
            add("self_attn.o_proj.bias", (h,), whole)
        add("post_attention_layernorm.weight", (h,), whole)
        if config.experts is not None:
            num, width = config.experts.num, config.intermediate_size
            add(ROUTER, (num, h), whole)
            add("mlp.experts.gate_proj.weight", (num, width, h), cols, experts=True)
            add("mlp.experts.up_proj.weight", (num, width, h), cols, experts=True)
            add("mlp.experts.down_proj.weight", (num, h, width), Even(dim=2), experts=True)
            continue
        add("mlp.gate_proj.weight", (config.intermediate_size, h), rows)
        add("mlp.up_proj.weight", (config.intermediate_size, h), rows)
        fused.append(
            Fused(
                name=f"{at}mlp.gate_up_proj.weight",
                parts=(f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"),
            )
        )
        add("mlp.down_proj.weight", (h, config.intermediate_size), cols)
    tensors.append(TensorSpec(name=FINAL_NORM, shape=(h,), cut=whole, place="last"))
    if config.head == "value":
        tensors.append(TensorSpec(name=VALUE_HEAD, shape=(1, h), cut=whole, place="last"))
    elif not tied:
        tensors.append(TensorSpec(name=HEAD, shape=(config.vocab_size, h), cut=vocab, place="last"))
    if config.lora is not None:
        specs, rules = adapter_tensors(tensors, fused, config.lora)
        tensors += specs
        fused += rules
    return ModelSpec(
        tensors=tuple(tensors),
        fused=tuple(fused),
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=kv,
        num_experts=0 if config.experts is None else config.experts.num,
    )
