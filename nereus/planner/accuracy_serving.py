"""How far predicted seconds per output token are from measured serving runs, before and after three
scalars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.decode_time import decode_step_terms, prefill_layer_s
from nereus.planner.layer_time import Place, Precision
from nereus.planner.measured import read_rows
from nereus.planner.memory import usable_bytes
from nereus.planner.profile import ClusterProfile
from nereus.planner.scalars import GENERATION, features, fit_scalars
from nereus.planner.shard_size import kv_bytes_per_token, rank_parameters

Floats = NDArray[np.float64]

_KINDS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
_CONFIGS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}
_FIXED_BYTES = 3e9  # context, communication buffers and graphs of an engine
_MIN_ROWS = 8  # a system needs this many rows before three scalars mean anything
FOLDS = 4


@dataclass(frozen=True, kw_only=True)
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
    shape: DecoderConfig

    @property
    def group(self) -> tuple[str, str, str]:
        """What the three scalars belong to."""
        return self.system, self.engine, self.model

    @property
    def setting(self) -> tuple[int, int, int]:
        """What a fold holds out."""
        return self.input_tokens, self.output_tokens, self.tp

    @cached_property
    def cluster(self) -> ClusterProfile:
        """One node of the system's GPU kind."""
        return ClusterProfile.parse(f"1x8x{_KINDS[self.system]}")

    @property
    def precision(self) -> Precision:
        """8-bit products; TensorRT-LLM keeps an 8-bit cache for such checkpoints, the others 16-bit by
        default.
        """
        return Precision(
            weight_bytes=1, activation_bytes=2, cache_bytes=1 if self.engine == "trtllm" else 2, speed=2
        )

    @property
    def resident(self) -> float:
        """Sequences that decode at once: the concurrency, or fewer where the cache cannot hold them."""
        free = usable_bytes(self.cluster, _KINDS[self.system]) - _FIXED_BYTES
        free -= float(rank_parameters(self.shape, self.tp, 1)) * self.precision.weight_bytes
        token = float(kv_bytes_per_token(self.shape, self.tp, 1, self.precision.cache_bytes))
        fit = free / token / (self.input_tokens + self.output_tokens / 2)
        return max(1.0, min(float(self.concurrency), fit))

    def predicted_s(self, calibration: Calibration) -> float:
        """A decode step at the mean context, and the share of every other request's prefill that
        interrupts it.
        """
        place = Place(
            shape=self.shape,
            cluster=self.cluster,
            gpu_kind=_KINDS[self.system],
            calibration=calibration,
            precision=self.precision,
        )
        batch, context = self.resident, self.input_tokens + self.output_tokens / 2
        terms = {
            name: float(term) for name, term in decode_step_terms(place, batch, context, self.tp).items()
        }
        host = terms.pop("host")
        prefill = self.shape.num_layers * float(prefill_layer_s(place, 1, self.input_tokens, self.tp))
        return (
            calibration.decode * sum(terms.values())
            + host
            + calibration.prefill * batch / self.output_tokens * prefill
        )


def read_serving(data: Path) -> tuple[ServingRow, ...]:
    """Dense 8-bit aggregated rows of the silicon sample under `data` (the folder that holds perf/ and
    real/).
    """
    models = json.loads((data / "real" / "model_configs.json").read_text())["models"]
    shapes = {name: DecoderConfig.from_hf(models[config]["config"]) for name, config in _CONFIGS.items()}
    rows = read_rows(data / "perf" / "aiconfigurator" / "silicon_sample_e2e_ttft_tpot.csv.gz")
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
            shape=shapes[row["model_path"]],
        )
        for row in rows
        if row["precision"] == "fp8" and row["mode"] == "agg" and row["model_path"] in shapes
    )


def uncalibrated(rows: Sequence[ServingRow]) -> Floats:
    """Seconds per token with the tables alone."""
    return np.array([row.predicted_s(NEUTRAL) for row in rows])


def cross_validated(rows: Sequence[ServingRow], *, seed: int = 0) -> Floats:
    """Seconds per token with three scalars a system, each row predicted by a fit that never saw its setting.

    NaN where a system has too few rows.
    """
    design = np.array([features(row.predicted_s, GENERATION) for row in rows])
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


def _folds(rows: Sequence[ServingRow], seed: int) -> NDArray[np.intp]:
    settings = sorted({row.setting for row in rows})
    order = np.random.default_rng(seed).permutation(len(settings))
    fold: Mapping[tuple[int, int, int], int] = {
        settings[place]: index % FOLDS for index, place in enumerate(order)
    }
    return np.array([fold[row.setting] for row in rows])
