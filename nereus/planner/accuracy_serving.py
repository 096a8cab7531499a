"""How far predicted seconds per output token are from measured serving runs, before and after three
scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.decode_time import decode_step_terms, prefill_layer_s
from nereus.planner.layer_time import Place, Precision
from nereus.planner.measured import read_rows
from nereus.planner.memory import usable_bytes
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.scalars import GENERATION, features, fit_scalars
from nereus.planner.shard_size import kv_bytes_per_token, rank_parameters

Floats = NDArray[np.float64]

KINDS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
SHAPES = {
    "meta-llama/Llama-3.1-70B": model_shape("llama-3.1-70b"),
    "Qwen/Qwen3-32B": model_shape("qwen3-32b"),
    "meta-llama/Llama-3.1-8B-Instruct": model_shape("llama-3.1-8b"),
    "nvidia/Llama-3.1-8B-Instruct-FP8": model_shape("llama-3.1-8b"),
}
_FIXED_BYTES = 3e9  # context, communication buffers and graphs of an engine
_MIN_ROWS = 8  # a system needs this many rows before three scalars mean anything
FOLDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One measured run: aggregated serving of a dense model with 8-bit weights at a fixed concurrency."""

    system: str
    engine: str
    model: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    tp: int
    seconds_per_token: float

    @property
    def group(self) -> tuple[str, str, str]:
        """What the three scalars belong to."""
        return self.system, self.engine, self.model

    @property
    def setting(self) -> tuple[int, int, int]:
        """What a fold holds out."""
        return self.input_tokens, self.output_tokens, self.tp


def read_serving(folder: Path) -> tuple[ServingRow, ...]:
    """Dense 8-bit aggregated rows of the silicon sample in `folder`."""
    return tuple(
        ServingRow(
            system=row["system"],
            engine=row["backend"],
            model=row["model_path"],
            input_tokens=int(row["isl"]),
            output_tokens=int(row["osl"]),
            concurrency=int(float(row["batch_size"])),
            tp=int(float(row["tp_size"])),
            seconds_per_token=float(row["silicon_tpot_ms"]) * 1e-3,
        )
        for row in read_rows(folder / "silicon_sample_e2e_ttft_tpot.csv.gz")
        if row["precision"] == "fp8" and row["mode"] == "agg" and row["model_path"] in SHAPES
    )


def predicted_s(rows: Sequence[ServingRow], calibration: Calibration) -> Floats:
    """Seconds per output token: a decode step at the mean context, and the prefills that interrupt it.

    TPOT = decode * step(b, input + output / 2) + host + prefill * b / output * prefill(input), with b the
    sequences that decode at once: while one request makes its output, each of the b others brings one
    prefill.
    """
    found = np.empty(len(rows))
    for group in {row.group for row in rows}:
        mine = [index for index, row in enumerate(rows) if row.group == group]
        found[mine] = _group_s([rows[index] for index in mine], calibration)
    return found


def _group_s(rows: Sequence[ServingRow], calibration: Calibration) -> Floats:
    """The same for rows of one (system, engine, model), priced together."""
    first = rows[0]
    kind, shape = KINDS[first.system], SHAPES[first.model]
    precision = Precision(
        weight_bytes=1,
        # TensorRT-LLM keeps an 8-bit cache for 8-bit checkpoints, the others a 16-bit one by default.
        cache_bytes=1 if first.engine == "trtllm" else 2,
        speed=2,
    )
    cluster = ClusterProfile.parse(f"1x8x{kind}")
    place = Place(shape=shape, cluster=cluster, gpu_kind=kind, calibration=calibration, precision=precision)
    tp = np.array([float(row.tp) for row in rows])
    inputs = np.array([float(row.input_tokens) for row in rows])
    outputs = np.array([float(row.output_tokens) for row in rows])
    concurrency = np.array([float(row.concurrency) for row in rows])
    context = inputs + outputs / 2
    free = usable_bytes(cluster, kind) - _FIXED_BYTES - rank_parameters(shape, tp, 1) * precision.weight_bytes
    fit = free / kv_bytes_per_token(shape, tp, 1, precision.cache_bytes) / context
    batch = np.clip(fit, 1.0, concurrency)
    terms = decode_step_terms(place, batch, context, tp)
    host = terms.pop("host")
    decode = np.asarray(sum(terms.values()))
    prefill = shape.num_layers * prefill_layer_s(place, 1, inputs, tp)
    return np.asarray(
        calibration.decode * decode + host + calibration.prefill * (batch - 1) / outputs * prefill
    )


def uncalibrated(rows: Sequence[ServingRow]) -> Floats:
    """Seconds per token with the tables alone."""
    return predicted_s(rows, NEUTRAL)


def cross_validated(rows: Sequence[ServingRow], *, seed: int = 0) -> Floats:
    """Seconds per token with three scalars a system, each row predicted by a fit that never saw its setting.

    NaN where a system has too few rows.
    """
    design = features(lambda calibration: predicted_s(rows, calibration), GENERATION)
    measured = np.array([row.seconds_per_token for row in rows])
    fold = _folds(rows, seed)
    predicted = np.full(len(rows), np.nan)
    for group in sorted({row.group for row in rows}):
        mine = np.array([row.group == group for row in rows])
        if mine.sum() < _MIN_ROWS:
            continue
        for held in range(FOLDS):
            train, test = mine & (fold != held), mine & (fold == held)
            predicted[test] = design[test] @ fit_scalars(design[train], measured[train])
    return predicted


def cross_validated_factor(rows: Sequence[ServingRow], predicted: Floats, *, seed: int = 0) -> Floats:
    """`predicted` times one factor a system, from the same folds: what a black box can be given at most."""
    measured = np.array([row.seconds_per_token for row in rows])
    fold, scaled = _folds(rows, seed), np.full(len(rows), np.nan)
    usable = ~np.isnan(predicted)
    for group in sorted({row.group for row in rows}):
        mine = np.array([row.group == group for row in rows]) & usable
        if mine.sum() < _MIN_ROWS:
            continue
        for held in range(FOLDS):
            train, test = mine & (fold != held), mine & (fold == held)
            factor = np.exp(np.median(np.log(measured[train] / predicted[train])))
            scaled[test] = factor * predicted[test]
    return scaled


def _folds(rows: Sequence[ServingRow], seed: int) -> NDArray[np.intp]:
    settings = sorted({row.setting for row in rows})
    order = np.random.default_rng(seed).permutation(len(settings))
    fold: Mapping[tuple[int, int, int], int] = {
        settings[place]: index % FOLDS for index, place in enumerate(order)
    }
    return np.array([fold[row.setting] for row in rows])
