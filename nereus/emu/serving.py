"""The KV cache of an engine that allocates it when it is made, for as long as it lives. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.emu.decoder import DecoderConfig
from nereus.emu.kinds import DTYPE_BYTES

BLOCK_TOKENS = 128  # tokens of a block of the cache on CPUs; larger than those of GPUs
CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What an engine with a KV cache of fixed size is made for; None takes the engine's own choice.

    `longest_tokens` are those of a prompt with its response (None: all of the model's positions), `rows` the
    sequences that run at once. `eager` runs without compiled graphs.
    """

    longest_tokens: int | None = None
    rows: int = 256
    kv_cache_bytes: int | None = None
    eager: bool | None = None


DEFAULT_SERVING = Serving()


def cache_bytes(
    model: DecoderConfig, tp: int, layers: int, *, longest_tokens: int, rows: int, limit_bytes: int
) -> int:
    """Bytes of the KV cache of a rank at this tp with so many layers.

    Room for `rows` sequences of the longest length, or what the limit allows; never less than one sequence
    takes.
    """
    heads = max(1, -(-model.num_kv_heads // tp))
    token = 2 * heads * model.head_dim * DTYPE_BYTES[model.dtype] * layers
    blocks = -(-longest_tokens // BLOCK_TOKENS) + 1
    one = blocks * BLOCK_TOKENS * token
    return max(one, min(limit_bytes, rows * one))
