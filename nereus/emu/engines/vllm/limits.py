"""What vLLM can run, checked before anything starts; and the memory of its KV cache. Pure: needs no vLLM."""

from __future__ import annotations

from nereus.emu.decoder import DecoderConfig
from nereus.emu.kinds import DTYPE_BYTES
from nereus.emu.layout import Layout
from nereus.errors import InvalidLayout, explain

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
BLOCK_TOKENS = 128  # tokens of a block of the cache on CPUs; larger than those of GPUs
CPU_CACHE_BYTES = 1 << 30


def check_runs(model: DecoderConfig, layout: Layout, *, on_cpu: bool) -> None:
    """Raise InvalidLayout unless vLLM can generate with this model in this layout."""
    if problem := _problem(model, layout, on_cpu):
        rule, values, remedy = problem
        at = f"tp={layout.tp} pp={layout.pp} layers={list(layout.layers)}"
        raise InvalidLayout(
            explain("vLLM cannot generate in this layout", values=f"{at}, {values}", rule=rule, remedy=remedy)
        )


def _problem(model: DecoderConfig, layout: Layout, on_cpu: bool) -> tuple[str, str, str] | None:
    tp, kv = layout.tp, model.num_kv_heads
    if on_cpu and model.head_dim not in CPU_HEAD_DIMS:
        return (
            f"on CPUs its kernels know head_dim {', '.join(map(str, CPU_HEAD_DIMS))}",
            f"head_dim={model.head_dim}",
            "use engines.generation: torch, or a model with such heads",
        )
    if model.num_heads % tp or model.intermediate_size % tp or (kv % tp if tp <= kv else tp % kv):
        return (
            "tp divides the heads and the intermediate size, and the kv heads or is a multiple of them",
            f"heads={model.num_heads} kv_heads={kv} intermediate_size={model.intermediate_size}",
            "choose such a tp for actor_generation, or engines.generation: torch",
        )
    if 64 % tp:
        return (
            "tp divides 64, the multiple to which it pads the vocabulary",
            f"tp={tp}",
            "choose a power of two",
        )
    return None


def cache_bytes(
    model: DecoderConfig, layout: Layout, *, longest_tokens: int, rows: int, limit_bytes: int
) -> int:
    """Bytes of the KV cache of the fullest rank: room for `rows` sequences of the longest length, or what the
    limit allows; never less than one sequence takes.
    """
    heads = max(1, -(-model.num_kv_heads // layout.tp))
    token = 2 * heads * model.head_dim * DTYPE_BYTES[model.dtype] * max(layout.layers)
    blocks = -(-longest_tokens // BLOCK_TOKENS) + 1
    one = blocks * BLOCK_TOKENS * token
    return max(one, min(limit_bytes, rows * one))
