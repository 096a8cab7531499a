"""What an engine cannot cut a model into, though a layout could.

Pure: configurations are checked with it before anything starts, and the planner proposes nothing else.
"""

from __future__ import annotations

from typing import Literal

from nereus.emu.decoder import DecoderConfig
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout, explain

EngineName = Literal["torch", "vllm", "megatron", "deepspeed"]
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's kernels know on CPUs."""
VOCAB_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this before it cuts it."""
Problem = tuple[str, str, str]
"""The values, the rule and the remedy of what does not fit."""


def check_layout(
    engine: EngineName,
    config: DecoderConfig,
    layout: Layout,
    *,
    on_cpu: bool = False,
    generates: bool = False,
) -> None:
    """Raise InvalidLayout unless the engine can run the model under this layout, or generate with it."""
    sizes = (layout.tp, layout.pp, layout.ep, layout.cp)
    problem = problem_with(engine, config, *sizes, on_cpu=on_cpu)
    if generates and layout.cp > 1:
        problem = _GENERATION
    if problem is not None:
        values, rule, remedy = problem
        raise InvalidLayout(
            explain(
                f"cannot cut the model for {engine}",
                values=f"{layout.sizes_text}, {values}",
                rule=rule,
                remedy=remedy,
            )
        )


_GENERATION: Problem = (
    "a decode step has one token of each sequence",
    "generation divides no sequence over ranks",
    "give actor_generation a plan of its own with cp=1",
)


def problem_with(
    engine: EngineName,
    config: DecoderConfig,
    tp: int,
    pp: int,
    ep: int = 1,
    cp: int = 1,
    *,
    on_cpu: bool = False,
) -> Problem | None:
    """Why the engine cannot run the model at (tp, pp, ep, cp), None where it can. That the heads and experts
    can be cut so is taken for granted.
    """
    if engine != "torch" and (problem := _beyond(engine, config, ep, cp)):
        return problem
    if engine == "vllm":
        return _vllm(config, tp, on_cpu)
    if engine == "megatron":
        return _megatron(config, tp)
    return _deepspeed(config, tp, pp) if engine == "deepspeed" else None


def _beyond(engine: EngineName, config: DecoderConfig, ep: int, cp: int) -> Problem | None:
    """Only the torch engine knows experts, and tokens of one sequence on several ranks."""
    if config.experts is not None:
        return (
            f"{config.experts.num} experts a layer",
            f"{engine} is driven for dense decoders only",
            "use engines.training=torch and engines.generation=torch for a mixture of experts",
        )
    if max(ep, cp) > 1:
        return (
            f"{config.num_layers} layers",
            f"{engine} is driven with tensor, pipeline and data parallelism only",
            "choose ep=1 and cp=1, or the torch engine",
        )
    return None


def _vllm(config: DecoderConfig, tp: int, on_cpu: bool) -> Problem | None:
    kv, remedy = config.num_kv_heads, "engines.generation=torch"
    if on_cpu and config.head_dim not in CPU_HEAD_DIMS:
        return (
            f"head_dim={config.head_dim}",
            f"on CPUs vLLM's kernels know head_dim {', '.join(map(str, CPU_HEAD_DIMS))}",
            f"use {remedy}, or a model with such heads",
        )
    if config.num_heads % tp or config.intermediate_size % tp or (kv % tp if tp <= kv else tp % kv):
        return (
            f"heads={config.num_heads} kv_heads={kv} intermediate_size={config.intermediate_size}",
            "tp divides the heads and the intermediate size, and the kv heads or is a multiple of them",
            f"choose such a tp for actor_generation, or {remedy}",
        )
    if VOCAB_MULTIPLE % tp:
        return (
            f"vocab_size={config.vocab_size}",
            f"tp divides {VOCAB_MULTIPLE}, the multiple to which vLLM pads the vocabulary",
            "choose a power of two",
        )
    return None


def _uneven(engine: str, config: DecoderConfig, tp: int) -> Problem | None:
    for what, size in (("kv heads", config.num_kv_heads), ("feed-forward columns", config.intermediate_size)):
        if size % tp:
            return (
                f"{size} {what}",
                f"{engine} gives every rank equally many whole {what}",
                f"choose a tp that divides {size}, or engines.training=torch",
            )
    return None


def _deepspeed(config: DecoderConfig, tp: int, pp: int) -> Problem | None:
    if pp > 1:
        return (
            f"{config.num_layers} layers",
            "DeepSpeed's pipeline needs a PipelineModule, which a Hugging Face decoder is not",
            "choose pp=1 with a larger tp, or engines.training=torch or megatron",
        )
    return _uneven("deepspeed", config, tp)


def _megatron(config: DecoderConfig, tp: int) -> Problem | None:
    if problem := _uneven("megatron", config, tp):
        return problem
    if config.attention_out_bias:
        return (
            "attention_bias=true",
            "megatron adds a bias to the output of attention only together with those of the MLP",
            "choose engines.training=torch for this model",
        )
    return None
