"""The (tp, pp, dp, ep, cp) that a model-stage may take on a pool: what fits its heads, layers, experts, nodes
and batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.errors import ConfigError, explain
from nereus.planner.fixed import Choice, Fix, avoided, chosen_number
from nereus.planner.profile import GpuPool
from nereus.planner.workload import ModelStage, Stage, Workload

Floats = NDArray[np.float64]
MAX_PP, MAX_EP, MAX_CP = 32, 64, 64
RING_TOKENS = 16384  # tokens of the longest sequence that every rank along cp has at least


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


def expert_sizes(shape: DecoderConfig, space: Space) -> list[int]:
    """ep that divides the experts: powers of two, in the general space any; 1 for a dense model."""
    if shape.experts is None:
        return [1]
    sizes = [size for size in _divisors(shape.experts.num) if size <= MAX_EP]
    return sizes if space is Space.GENERAL else [size for size in sizes if size & (size - 1) == 0]


def context_sizes(model_stage: ModelStage, workload: Workload) -> list[int]:
    """cp in powers of two while every rank keeps `RING_TOKENS` of the longest sequence; 1 in generation."""
    if model_stage.stage is Stage.GENERATION:
        return [1]
    most = int(min(MAX_CP, max(1.0, workload.max_sequence_tokens / RING_TOKENS)))
    return _powers_of_two(most)


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
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Arrays (tp, pp, dp, ep, cp) of all layouts of a model-stage on a pool, fixed choices kept."""
    shape, fixed = workload.shape(model_stage), tuple(fixed)
    tp, pp, dp, gpus, ep, cp = (chosen_number(fixed, model_stage, key) for key in _SIZES)
    tensor = [size for size in tensor_sizes(shape, pool) if tp in (None, size)]
    stages = pipeline_sizes(shape, space) if pp is None else [pp]
    experts = expert_sizes(shape, space) if ep is None else [ep]
    contexts = context_sizes(model_stage, workload) if cp is None else [cp]
    left_out = avoided(fixed, model_stage)
    rows: list[tuple[int, ...]] = []
    for t, p, e, c in product(tensor, stages, experts, contexts):
        unit = t * p * e * c
        if (t, p, e, c) in left_out or workload.problem_at(model_stage, t, p, e, c):
            continue
        most = pool.num_gpus // unit
        counts = [dp] if dp is not None else unit_counts(model_stage, workload, most, space)
        if gpus is not None:
            whole = gpus // unit
            counts = [whole] if gpus == whole * unit and dp in (None, whole) else []
        rows += [(t, p, d, e, c) for d in counts if 1 <= d <= most]
    tp_, pp_, dp_, ep_, cp_ = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return tp_, pp_, dp_, ep_, cp_


_SIZES = (Choice.TP, Choice.PP, Choice.DP, Choice.GPUS, Choice.EP, Choice.CP)


def check_fixed(
    model_stage: ModelStage, workload: Workload, pools: Sequence[GpuPool], fixed: Iterable[Fix]
) -> None:
    """Raise ConfigError for a fixed tp, pp or number of GPUs that the model or every pool rules out."""
    shape, fixed = workload.shape(model_stage), tuple(fixed)
    tp, pp, dp, gpus, ep, cp = (chosen_number(fixed, model_stage, key) for key in _SIZES)
    sizes = sorted({size for pool in pools for size in tensor_sizes(shape, pool)})
    _check_engine(model_stage, workload, sizes if tp is None else [tp], pp or 1, ep or 1, cp or 1)
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
    _check_axes(model_stage, workload, ep or 1, cp or 1)
    unit = (tp or 1) * (pp or 1) * (ep or 1) * (cp or 1)
    need = max(unit * (dp or 1), gpus or 1)
    most = max(pool.num_gpus for pool in pools)
    if need > most:
        raise ConfigError(
            explain(
                f"cannot fix {need} GPUs for {model_stage}",
                rule=f"the largest pool has {most}",
                remedy="lower tp, pp, ep, cp, dp or gpus, or plan for a larger cluster",
            )
        )
    if gpus is not None and gpus % (unit * (dp or 1)):
        raise ConfigError(
            explain(
                f"cannot fix {gpus} GPUs for {model_stage}",
                rule=f"gpus must be a multiple of the fixed tp, pp, ep, cp and dp, {unit * (dp or 1)}",
            )
        )


def _check_axes(model_stage: ModelStage, workload: Workload, ep: int, cp: int) -> None:
    """Raise ConfigError where the model has no such parts of experts, or the stage none of tokens."""
    experts = workload.shape(model_stage).experts
    if ep > 1 and (experts is None or experts.num % ep):
        has = "no experts" if experts is None else f"{experts.num} experts"
        raise ConfigError(
            explain(
                f"cannot fix ep={ep} of {model_stage}", values=has, rule="ep divides the experts of a layer"
            )
        )
    if cp > 1 and model_stage.stage is Stage.GENERATION:
        raise ConfigError(
            explain(
                f"cannot fix cp={cp} of {model_stage}",
                rule="only training and scoring divide a sequence over ranks",
                remedy="fix cp of training or inference, e.g. actor.training.cp=2",
            )
        )


def _check_engine(
    model_stage: ModelStage, workload: Workload, tensor: Sequence[int], pp: int, ep: int, cp: int
) -> None:
    """Raise ConfigError where the engine can run none of these tp at this pp, ep and cp."""
    problems = [workload.problem_at(model_stage, tp, pp, ep, cp) for tp in tensor]
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
