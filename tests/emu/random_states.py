"""Random cluster states before and after a transition, of a model small enough to plan for at once."""

from __future__ import annotations

import random
from collections.abc import Mapping

from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.emu.kinds import Kinds, serving_kinds, training_kinds
from nereus.emu.layout import Layout, Rank
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit import ClusterState, Unit, UnitId

CONFIG = DecoderConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
)
SPEC = decoder_spec(CONFIG)
SHAPES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
SERVE_SERVE = ("actor.generation", "reference.inference")
SERVE_TRAIN = ("actor.generation", "critic.training")
TRAIN_TRAIN = ("actor.training", "critic.training")
PAIRS = (SERVE_SERVE, SERVE_TRAIN, TRAIN_TRAIN)


def models_of(*states: ClusterState) -> Mapping[str, ModelSpec]:
    return {unit.model: SPEC for state in states for unit in state.units}


def kinds_of(model_stage: str) -> Kinds:
    return training_kinds("bf16") if model_stage.endswith(".training") else serving_kinds("bf16")


def random_units(draw: random.Random, model_stage: str, ranks: list[Rank]) -> list[Unit]:
    """Units of one shape on some of the ranks, in nodes of their own order or shuffled."""
    shapes = [shape for shape in SHAPES if shape[0] * shape[1] <= len(ranks)]
    tp, pp = draw.choice(shapes)
    size = tp * pp
    num_units = draw.randint(1, len(ranks) // size)
    chosen = list(ranks)
    if draw.random() < 0.3:
        draw.shuffle(chosen)
    else:
        shift = draw.choice((0, 0, 0, 1, 2))
        chosen = chosen[shift:] + chosen[:shift]
    return [
        Unit(
            id=UnitId(model_stage, index),
            model=model_stage.partition(".")[0],
            layout=Layout.make(SPEC, tp=tp, pp=pp, ranks=tuple(chosen[index * size : (index + 1) * size])),
            kinds=kinds_of(model_stage),
        )
        for index in range(num_units)
    ]


def random_state(draw: random.Random, model_stages: tuple[str, ...], num_ranks: int) -> ClusterState:
    """Every model-stage somewhere; those of one stage on disjoint ranks, those of two stages anywhere."""
    stages = {name.partition(".")[2] for name in model_stages}
    pools: dict[str, list[Rank]] = {}
    units: list[Unit] = []
    for stage in sorted(stages):
        mine = [name for name in model_stages if name.partition(".")[2] == stage]
        ranks = list(range(num_ranks))
        if len(mine) > 1 and draw.random() < 0.5:
            ranks = ranks[num_ranks // 2 :] + ranks[: num_ranks // 2]
        cut = num_ranks // len(mine)
        for at, name in enumerate(mine):
            pools[name] = ranks[at * cut : (at + 1) * cut]
            units += random_units(draw, name, pools[name])
    return ClusterState.of(units, range(num_ranks))


def random_pair(seed: int, *, num_ranks: int = 8) -> tuple[ClusterState, ClusterState]:
    """A state before and one after of two model-stages that overlap in space."""
    draw = random.Random(seed)
    pair = PAIRS[seed % len(PAIRS)]
    return random_state(draw, pair, num_ranks), random_state(draw, pair, num_ranks)
