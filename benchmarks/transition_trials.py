"""Random transitions of two model-stages that overlap on GPUs, with memory as tight as asked for.

The kinds of a trial: serve/serve (generation and inference share GPUs), serve/train, and train/train (two
trained models side by side, which trade places). Every trial is a function of its seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from nereus.emu.chain_time import Seconds, planned
from nereus.emu.chains import Chain
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.graph import TransitionGraph, build_graph
from nereus.emu.kinds import Kinds, serving_kinds, training_kinds
from nereus.emu.layout import Layout, Rank
from nereus.emu.schedule_problem import Room
from nereus.emu.shard_bytes import Sizes, sizes_of
from nereus.emu.tensor import ModelSpec
from nereus.emu.topology import Link, Topology
from nereus.emu.unit import ClusterState, Unit, UnitId

KINDS = ("serve/serve", "serve/train", "train/train")
STAGES: Mapping[str, tuple[str, str]] = {
    "serve/serve": ("actor.generation", "reference.inference"),
    "serve/train": ("actor.generation", "critic.training"),
    "train/train": ("actor.training", "critic.training"),
}
SHAPES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))
BLOCK = 4  # ranks; units lie inside blocks, as TP groups lie inside nodes
LINK = Link(bytes_per_s=1e6, latency_s=1e-3)  # a shard of the small models takes tens of milliseconds


@lru_cache(maxsize=8)
def model_spec(hidden_size: int) -> ModelSpec:
    """A four-layer decoder of that width."""
    return decoder_spec(
        DecoderConfig.from_hf(
            {
                "model_type": "llama",
                "vocab_size": 128,
                "hidden_size": hidden_size,
                "intermediate_size": 2 * hidden_size,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": hidden_size // 4,
            }
        )
    )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One transition to schedule. `slack` is the free memory, in mean shards, beside the larger state."""

    seed: int
    kind: str
    slack: float
    graph: TransitionGraph
    sizes: Sizes
    seconds: Seconds
    room: Room
    topology: Topology


def trial(seed: int, *, num_ranks: int = 16, slack: float) -> Trial:
    """The trial of a seed; kinds take turns."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    models = {model: model_spec(draw.choice((32, 48, 64))) for model in ("actor", "critic", "reference")}
    before, target = (_state(draw, kind, models, num_ranks) for _ in range(2))
    topology = Topology(nodes=(tuple(range(num_ranks)),), node=LINK, network=LINK)
    sizes = sizes_of(models)
    return Trial(
        seed=seed,
        kind=kind,
        slack=slack,
        graph=build_graph(before, target, topology),
        sizes=sizes,
        seconds=whole_milliseconds(planned(models, topology)),
        room=tight_room(before, target, sizes, slack),
        topology=topology,
    )


def whole_milliseconds(seconds: Seconds) -> Seconds:
    """Durations that are whole numbers, so that a solver over integers sees the very same instance."""

    def rounded(chain: Chain) -> float:
        return float(math.ceil(1e3 * seconds(chain)))

    return rounded


def loads(state: ClusterState, sizes: Sizes) -> Counter[Rank]:
    """Bytes of model state on every rank."""
    out: Counter[Rank] = Counter()
    for unit in state.units:
        for rank, amount in zip(unit.layout.ranks, sizes(unit), strict=True):
            out[rank] += amount
    return out


def tight_room(before: ClusterState, target: ClusterState, sizes: Sizes, slack: float) -> Room:
    """On every rank room for the larger of its two states and `slack` mean shards."""
    old, new = loads(before, sizes), loads(target, sizes)
    shards = [amount for state in (before, target) for unit in state.units for amount in sizes(unit)]
    free = int(slack * sum(shards) / len(shards))
    return Room(
        cap_bytes=0,
        cap_by_rank={rank: max(old[rank], new[rank]) + free for rank in before.ranks},
        # In bytes a millisecond, the unit of the durations: a quarter of the links' rate.
        host_bytes_per_s=LINK.bytes_per_s / 4e3,
    )


def _state(draw: random.Random, kind: str, models: Mapping[str, ModelSpec], num_ranks: int) -> ClusterState:
    blocks = list(range(num_ranks // BLOCK))
    draw.shuffle(blocks)
    first, second = STAGES[kind]
    if kind == "train/train":
        cut = draw.randint(1, len(blocks) - 1)
        shares = {first: blocks[:cut], second: blocks[cut:]}
    else:
        shares = {stage: draw.sample(blocks, draw.randint(2, len(blocks))) for stage in (first, second)}
    units = [unit for stage, mine in shares.items() for unit in _units(draw, stage, models, mine)]
    return ClusterState.of(units, range(num_ranks))


def _units(
    draw: random.Random, model_stage: str, models: Mapping[str, ModelSpec], blocks: list[int]
) -> list[Unit]:
    model = model_stage.partition(".")[0]
    tp, pp = draw.choice(SHAPES)
    size = tp * pp
    stride = draw.choice((False, False, True))
    ranks: list[tuple[Rank, ...]] = []
    for block in blocks:
        members = list(range(block * BLOCK, (block + 1) * BLOCK))
        if stride:  # non-adjacent ranks together, so that units of two model-stages cross
            members = members[::2] + members[1::2]
        ranks += [tuple(members[at : at + size]) for at in range(0, BLOCK, size)]
    chosen = ranks if draw.random() < 0.5 else draw.sample(ranks, draw.randint(1, len(ranks)))
    return [
        Unit(
            id=UnitId(model_stage, index),
            model=model,
            layout=Layout.make(models[model], tp=tp, pp=pp, ranks=members),
            kinds=_kinds(model_stage),
        )
        for index, members in enumerate(chosen)
    ]


def _kinds(model_stage: str) -> Kinds:
    return training_kinds("bf16") if model_stage.endswith(".training") else serving_kinds("bf16")
