"""Shards built straight from a definition of every logical number, against which moved ones are compared."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.decoder import DecoderConfig, DType, Experts, decoder_spec
from nereus.emu.kinds import Kinds, training_kinds
from nereus.emu.layout import Layout, Rank, shard
from nereus.emu.tensor import Box, Fused, ModelSpec
from nereus.emu.unit import Unit, UnitId
from nereus.errors import InvalidLayout


def logical(kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A full logical tensor: distinct everywhere, exact in every dtype, never zero."""
    start = zlib.crc32(f"{kind}/{name}".encode()) % 251
    numbers = torch.arange(prod(shape), dtype=torch.int64) * 7 + start
    return (numbers % 255 + 1).to(dtype).view(shape)  # integers up to 255 are exact in bfloat16


def box_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(lo, hi) for lo, hi in box)]


def dtypes(kinds: Kinds) -> dict[str, torch.dtype]:
    return {kind.name: TORCH_DTYPE[kind.dtype] for kind in kinds}


def empty_state(model: ModelSpec, unit: Unit, rank: Rank, *, allocated: bool = True) -> ShardState:
    """The rank's zeroed shard."""
    return ShardState.empty(shard(model, unit.layout, rank), dtypes(unit.kinds), allocated=allocated)


def direct_state(model: ModelSpec, unit: Unit, rank: Rank, *, salt: str = "") -> ShardState:
    """The rank's shard, filled from the definition."""
    state = empty_state(model, unit, rank)
    for kind, arena in state.arenas.items():
        for piece in state.shard.pieces:
            whole = logical(salt + kind, piece.logical, model.by_name[piece.logical].shape, arena.dtype)
            arena.piece(piece).copy_(box_of(whole, piece.box))
    return state


def differences(found: ShardState, wanted: ShardState) -> list[str]:
    """Names of tensors that are not equal bit for bit; `gaps` for an arena whose rest differs."""
    out = []
    for kind, arena in wanted.arenas.items():
        for name, view in arena.views.items():
            if not torch.equal(found[kind][name].view(torch.uint8), view.view(torch.uint8)):
                out.append(f"{kind}/{name}")
        if not out and not torch.equal(found[kind].flat.view(torch.uint8), arena.flat.view(torch.uint8)):
            out.append(f"{kind}/gaps")
    return out


def random_model(rng: random.Random) -> ModelSpec:
    """A small decoder with any mixture of grouping, padding, ties, biases, fusing and experts."""
    kv = rng.choice([1, 2, 3, 4])
    heads = kv * rng.choice([1, 2, 4])
    mixed = rng.random() < 0.4
    config = DecoderConfig(
        family=rng.choice(["llama", "qwen2", "qwen3"]),
        vocab_size=rng.choice([31, 32, 37]),
        hidden_size=rng.choice([8, 12]),
        num_layers=rng.randint(3, 5),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=rng.choice([2, 4]),
        intermediate_size=rng.choice([2, 3]) if mixed else rng.choice([6, 12, 20]),
        experts=Experts(num=rng.choice([4, 6]), per_token=2) if mixed else None,
        tied=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.3,
    )
    spec = decoder_spec(config, vocab_multiple=rng.choice([1, 4, 8]))
    match rng.choice(["fused", "unfused", "per_kv_group"]):
        case "unfused":
            return replace(spec, fused=())
        case "per_kv_group":
            rules = tuple(
                Fused(name=rule.name, parts=rule.parts, order="per_kv_group") if "qkv" in rule.name else rule
                for rule in spec.fused
            )
            return replace(spec, fused=rules)
    return spec


def random_kinds(rng: random.Random) -> Kinds:
    theta: DType = rng.choice(["bf16", "fp16", "fp32"])
    return training_kinds(theta)


def random_units(
    rng: random.Random, model: ModelSpec, kinds: Kinds, ranks: tuple[Rank, ...], *, first_index: int
) -> tuple[Unit, ...]:
    """Units of one random shape on a random part of the ranks, in random order, stages split unevenly."""
    while True:
        tp, pp = rng.choice([1, 2, 3, 4, 6, 8]), rng.randint(1, 3)
        ep, cp = rng.choice([1, 2, 3, 4] if model.num_experts else [1]), rng.choice([1, 1, 1, 2, 3])
        size = tp * pp * ep * cp
        if size > len(ranks) or pp > model.num_layers:
            continue
        dp = rng.randint(1, len(ranks) // size)
        cuts = sorted(rng.sample(range(1, model.num_layers), pp - 1))
        layers = tuple(hi - lo for lo, hi in zip([0, *cuts], [*cuts, model.num_layers], strict=True))
        chosen = rng.sample(ranks, size * dp)
        try:
            return tuple(
                Unit(
                    id=UnitId("actor.training", first_index + i),
                    model="actor",
                    layout=Layout.make(
                        model,
                        tp=tp,
                        pp=pp,
                        ranks=tuple(chosen[i * size : (i + 1) * size]),
                        layers=layers,
                        ep=ep,
                        cp=cp,
                    ),
                    kinds=kinds,
                )
                for i in range(dp)
            )
        except InvalidLayout:
            continue
