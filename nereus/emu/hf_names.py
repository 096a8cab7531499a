"""Under which names a published checkpoint holds a logical tensor: its own, or one name for every expert.

mlp.experts.up_proj.weight [E, f, h]    qwen3_moe   mlp.experts.0.up_proj.weight [f, h], ...
                                        mixtral     block_sparse_moe.experts.0.w3.weight [f, h], ...
"""

from __future__ import annotations

from nereus.emu.decoder import ROUTER, DecoderConfig
from nereus.emu.tensor import Box, TensorSpec, whole

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

Stored = tuple[str, tuple[int, ...], Box]  # name, shape, and the box of the logical tensor that it is


def stored_as(config: DecoderConfig, spec: TensorSpec) -> tuple[Stored, ...]:
    """The stored tensors that together are a logical one, in the order of its dim 0."""
    if not spec.experts:
        name = spec.name
        if config.family == "mixtral" and name.endswith(ROUTER):
            name = name.removesuffix(ROUTER) + "block_sparse_moe.gate.weight"
        return ((name, spec.shape, whole(spec.shape)),)
    at, _, leaf = spec.name.partition("mlp.experts.")
    owner = f"{at}mlp.experts"
    if config.family == "mixtral":
        part = leaf.removesuffix(".weight")
        owner, leaf = f"{at}block_sparse_moe.experts", f"{_MIXTRAL[part]}.weight"
    rest = spec.shape[1:]
    return tuple(
        (f"{owner}.{number}.{leaf}", rest, ((number, number + 1), *whole(rest)))
        for number in range(spec.shape[0])
    )
