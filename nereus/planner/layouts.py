"""The (tp, pp, dp) that a model-stage may take on a pool: what fits its heads, layers, nodes and batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.errors import ConfigError, explain
from nereus.planner.fixed import Choice, Fix, avoided, chosen_number
from nereus.planner.profile import GpuPool
from nereus.planner.workload import ModelStage, Workload

Floats = NDArray[np.float64]
MAX_PP = 32


class Space(StrEnum):
    """Which sizes may be chosen: powers of two, or any dp and also any divisor of the layers as pp."""

    POW2 = "pow2"
    GENERAL = "general"


def tensor_sizes(shape: DecoderConfig, pool: GpuPool) -> list[int]:
    """tp that divides the heads evenly and stays inside a node (so that units pack into whole nodes)."""
    heads, kv = shape.num_heads, shape.num_kv_heads
    return [tp for tp in _divisors(pool.gpus_per_node) if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)]


def pipeline_sizes(shape: DecoderConfig, space: Space) -> list[int]:
    """Powers of two (uneven splits allowed), in the general space also the divisors of the layers."""
    most = min(MAX_PP, shape.num_layers)
    sizes = set(_powers_of_two(most))
    if space is Space.GENERAL:
        sizes |= {size for size in _divisors(shape.num_layers) if size <= most}
    return sorted(sizes)


def unit_counts(model_stage: ModelStage, workload: Workload, most: int, space: Space) -> list[int]:
    """dp up to `most` that are worth listing.

    In the general space the smallest dp of every share ceil(sequences / dp): a larger one for the same
    share costs more and is no faster. The two stages of a trained model list the union of both their
    shares, so that the layout they would share is among each one's.
    """
    if space is Space.POW2:
        largest = max(_batches(model_stage, workload))
        return [dp for dp in _powers_of_two(most) if dp < 2 * largest]
    counts: set[int] = set()
    for sequences in _batches(model_stage, workload):
        counts.update(_smallest_for_each_share(sequences))
    return sorted(dp for dp in counts if dp <= most)


def layouts(
    model_stage: ModelStage, workload: Workload, pool: GpuPool, space: Space, fixed: Iterable[Fix]
) -> tuple[Floats, Floats, Floats]:
    """Arrays (tp, pp, dp) of all layouts of a model-stage on a pool, fixed choices kept."""
    shape, fixed = workload.shape(model_stage), tuple(fixed)
    tp, pp, dp, gpus = (
        chosen_number(fixed, model_stage, key) for key in (Choice.TP, Choice.PP, Choice.DP, Choice.GPUS)
    )
    tensor = [size for size in tensor_sizes(shape, pool) if tp in (None, size)]
    stages = pipeline_sizes(shape, space) if pp is None else [pp]
    left_out = avoided(fixed, model_stage)
    rows: list[tuple[int, int, int]] = []
    for t in tensor:
        for p in stages:
            if (t, p) in left_out or workload.problem_at(model_stage, t, p):
                continue
            most = pool.num_gpus // (t * p)
            counts = [dp] if dp is not None else unit_counts(model_stage, workload, most, space)
            if gpus is not None:
                whole = gpus // (t * p)
                counts = [whole] if gpus == whole * t * p and dp in (None, whole) else []
            rows += [(t, p, d) for d in counts if 1 <= d <= most]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def check_fixed(
    model_stage: ModelStage, workload: Workload, pools: Sequence[GpuPool], fixed: Iterable[Fix]
) -> None:
    """Raise ConfigError for a fixed tp, pp or number of GPUs that the model or every pool rules out."""
    shape, fixed = workload.shape(model_stage), tuple(fixed)
    tp, pp, dp, gpus = (
        chosen_number(fixed, model_stage, key) for key in (Choice.TP, Choice.PP, Choice.DP, Choice.GPUS)
    )
    sizes = sorted({size for pool in pools for size in tensor_sizes(shape, pool)})
    _check_engine(model_stage, workload, sizes if tp is None else [tp], pp or 1)
    if tp is not None and tp not in sizes:
        node = max(pool.gpus_per_node for pool in pools)
        raise ConfigError(
            explain(
                f"cannot fix tp={tp} of {model_stage}",
                rule=f"tp must divide its {shape.num_heads} heads evenly ({shape.num_kv_heads} kv heads) and "
                f"the {node} GPUs of a node",
                remedy=f"take one of {', '.join(map(str, sizes))}",
            )
        )
    if pp is not None and pp > shape.num_layers:
        raise ConfigError(
            explain(f"cannot fix pp={pp} of {model_stage}", rule=f"it has {shape.num_layers} layers")
        )
    unit = (tp or 1) * (pp or 1)
    need = max(unit * (dp or 1), gpus or 1)
    most = max(pool.num_gpus for pool in pools)
    if need > most:
        raise ConfigError(
            explain(
                f"cannot fix {need} GPUs for {model_stage}",
                rule=f"the largest pool has {most}",
                remedy="lower tp, pp, dp or gpus, or plan for a larger cluster",
            )
        )
    if gpus is not None and gpus % (unit * (dp or 1)):
        raise ConfigError(
            explain(
                f"cannot fix {gpus} GPUs for {model_stage}",
                rule=f"gpus must be a multiple of the fixed tp, pp and dp, {unit * (dp or 1)}",
            )
        )


def _check_engine(model_stage: ModelStage, workload: Workload, tensor: Sequence[int], pp: int) -> None:
    """Raise ConfigError where the engine can run none of these tp at this pp."""
    problems = [workload.problem_at(model_stage, tp, pp) for tp in tensor]
    if problems and all(problems):
        values, rule, remedy = next(problem for problem in problems if problem is not None)
        engine = workload.engines.of(model_stage.stage)
        raise ConfigError(
            explain(
                f"{engine} cannot run {model_stage}",
                values=f"tp={', '.join(map(str, tensor))} pp={pp}, {values}",
                rule=rule,
                remedy=remedy,
            )
        )


def _batches(model_stage: ModelStage, workload: Workload) -> tuple[int, ...]:
    """Sequences that dp divides, in the model-stage and in its trained partner."""
    trained = -(-workload.num_sequences // workload.num_mini_batches)
    return {
        "actor": (workload.num_generated, workload.num_sequences, trained),
        "critic": (workload.num_sequences, trained),
    }.get(model_stage.model, (workload.num_sequences,))


@lru_cache(maxsize=64)
def _smallest_for_each_share(sequences: int) -> tuple[int, ...]:
    shares = np.unique(-(-sequences // np.arange(1, sequences + 1)))
    return tuple(np.unique(-(-sequences // shares)).tolist())


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())] if most >= 1 else []
