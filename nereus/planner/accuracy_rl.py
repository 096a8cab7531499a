"""Published RL runs against the model: the order of their step times, and that layouts known to fit do
fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.cost import stage_time, step_time
from nereus.planner.experts import MIXTURES, ExpertLayout, ExpertShape, even_split, training_peak_bytes
from nereus.planner.lengths import LengthDistribution
from nereus.planner.measured import read_rows
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile, GpuProfile, gpu_profile
from nereus.planner.workload import Algorithm, ModelShapes, ModelStage, Recompute, Schedule, Workload

Floats = NDArray[np.float64]

_SHAPES: dict[str, DecoderConfig] = {
    "LLAMA3.1_8B": model_shape("llama-3.1-8b"),
    "Qwen3-32B": model_shape("qwen3-32b"),
}
_MIXTURES = {
    "Qwen3-30B3A": "Qwen3-30B-A3B",
    "Qwen3-235B": "Qwen3-235B-A22B",
    "DeepSeek V3": "DeepSeek-V3",
}
_PROMPT_TOKENS = 256
_GENERATION_SHARE = 0.5  # of the GPUs when generation has its own: the tables do not say
_FIT_BYTES = 96e9 * 0.9  # the recommended layouts are for GPUs of 80 to 96 GB
_TRAIN_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """One row of a published throughput table."""

    version: str
    system: str
    precision: str
    model: str
    lag: int
    max_tokens: int
    mean_tokens: int
    gpus: int
    sequences: int
    train_sequences: int
    generation_tp: int
    train_tp: int
    train_pp: int
    seconds: float

    @property
    def family(self) -> tuple[str, str]:
        """Rows that differ only in layout, GPUs, overlap and precision."""
        return self.system, self.model


def read_published(folder: Path) -> tuple[PublishedStep, ...]:
    """The GRPO rows of the throughput tables in `folder` (the multi-turn row is left out)."""
    rows = read_rows(folder / "nemo_rl_grpo_throughput.csv")
    return tuple(
        PublishedStep(
            version=row["doc_version"],
            system=row["system"],
            precision=row["train_precision"],
            model=row["model"],
            lag=0 if row["policy_lag"] == "On policy" else int(row["policy_lag"].split("-")[0]),
            max_tokens=int(row["max_seq_len"]),
            mean_tokens=int(row["avg_gen_seq_len"]),
            gpus=int(row["gpus"]),
            sequences=int(row["gen_gbs"]),
            train_sequences=int(row["train_gbs"]),
            generation_tp=int(row["gen_tp"]),
            train_tp=int(row["train_tp"] or 1),
            train_pp=int(row["train_pp"] or 1),
            seconds=float(row["step_time_s"]),
        )
        for row in rows
        if row["algorithm"] in ("GRPO", "DAPO") and row["model"] in {**_SHAPES, **_MIXTURES}
    )


def predicted_step_s(step: PublishedStep) -> float:
    """Seconds of one step with the tables alone: no scalar was fitted to any RL run.

    Time of a mixture is that of the dense decoder a token sees; in decoding, the experts that a batch touches
    are read besides. One step off and later, generation has half of the GPUs to itself.
    """
    mixture = MIXTURES.get(_MIXTURES.get(step.model, ""))
    shape = _SHAPES[step.model] if mixture is None else mixture.active
    kind, cluster = _cluster(step)
    p95 = step.max_tokens if 2 * step.mean_tokens > step.max_tokens else 2 * step.mean_tokens
    workload = Workload(
        algorithm=Algorithm.GRPO,
        models=ModelShapes(actor=shape, reference=shape),
        num_prompts=step.sequences,
        prompt_tokens=_PROMPT_TOKENS,
        response=LengthDistribution.from_mean_p95_max(step.mean_tokens, p95, step.max_tokens),
        schedule=Schedule.SYNC if step.lag == 0 else Schedule.ONE_STEP_OFF,
        recompute=Recompute.FULL,
        num_mini_batches=max(step.sequences // step.train_sequences, 1),
        max_resident=256,
    )
    generators = step.gpus if step.lag == 0 else int(step.gpus * _GENERATION_SHARE)
    trainers = step.gpus if step.lag == 0 else step.gpus - generators
    times = {}
    for stage in workload.model_stages:
        generates = stage is ModelStage.ACTOR_GENERATION
        tp, pp = (step.generation_tp, 1) if generates else (step.train_tp, step.train_pp)
        dp = max((generators if generates else trainers) // (tp * pp), 1)
        cost = stage_time(stage, tp, pp, dp, workload=workload, cluster=cluster, gpu_kind=kind)
        extra = _expert_reads_s(mixture, workload, tp, dp, cluster.pool(kind).gpu) if generates else 0.0
        times[stage] = cost.latency_s + extra
    return step_time(times, workload.schedule)


def _expert_reads_s(
    mixture: ExpertShape | None, workload: Workload, tp: int, dp: int, gpu: GpuProfile
) -> float:
    """Seconds of decoding to read the experts that a batch touches beyond those that one token sees."""
    if mixture is None:
        return 0.0
    share = workload.num_generated / dp
    resident = min(share, float(workload.max_resident or share))
    seen = mixture.expert_parameters * mixture.experts_per_token
    more = max(mixture.touched_parameters(resident) - seen, 0.0)
    read_s = 2 * more * mixture.active.num_layers / tp / (0.8 * gpu.memory_bandwidth_Bps)
    return max(share / resident, 1.0) * workload.response.mean * read_s


def _cluster(step: PublishedStep) -> tuple[str, ClusterProfile]:
    """H100 nodes of eight; a GB200 rack is one scale-up domain of up to 72 (its GPU priced as a B200)."""
    if step.system == "GB200":
        domain = min(step.gpus, 64)
        return "B200", ClusterProfile.parse(f"{max(step.gpus // domain, 1)}x{domain}xB200")
    nodes = max(step.gpus // gpu_profile("H100").gpus_per_node, 1)
    return "H100", ClusterProfile.parse(f"{nodes}x{min(step.gpus, 8)}xH100")


def concordance(
    steps: Sequence[PublishedStep], predicted: Floats, *, apart: float = 1.1, same_lag: bool = False
) -> tuple[int, int]:
    """(pairs in the right order, pairs) of one family and precision whose measured times differ by `apart`.

    `same_lag` keeps pairs of one policy lag, which differ in layout and GPUs only.
    """
    right = total = 0
    for i, j in combinations(range(len(steps)), 2):
        first, second = steps[i], steps[j]
        if (first.family, first.precision) != (second.family, second.precision):
            continue
        if same_lag and first.lag != second.lag:
            continue
        ratio = first.seconds / second.seconds
        if max(ratio, 1 / ratio) < apart:
            continue
        total += 1
        right += int((predicted[i] > predicted[j]) == (ratio > 1))
    return right, total


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedLayout:
    """A layout that its source recommends as fitting, and our peak for it."""

    model: str
    gpus: int
    layout: ExpertLayout
    peak_bytes: float

    @property
    def fits(self) -> bool:
        """True when the peak is within 96 GB less the margin."""
        return self.peak_bytes <= _FIT_BYTES


def read_recommended(folder: Path) -> tuple[RecommendedLayout, ...]:
    """The recommended layouts of `folder`, priced at 4,096 tokens a micro-batch."""
    found = []
    for row in read_rows(folder / "verl_recommended_layouts.csv"):
        shape = MIXTURES[row["model"].removesuffix("-671B")]
        tp, pp, gpus = int(row["tp"]), int(row["pp"]), int(row["gpus"])
        last = int(row["last_layer_layers"]) if row["last_layer_layers"] else None
        layout = ExpertLayout(
            tp=tp,
            pp=pp,
            dp=gpus // (tp * pp),
            ep=int(row["ep"]),
            offloaded=float(row["optimizer_offload_fraction"]),
            layers=even_split(shape.active.num_layers, pp, last),
        )
        peak = training_peak_bytes(shape, layout, micro_batch_tokens=_TRAIN_TOKENS)
        found.append(RecommendedLayout(model=row["model"], gpus=gpus, layout=layout, peak_bytes=peak))
    return tuple(found)


def without_offload(layout: RecommendedLayout) -> float:
    """Peak bytes of the same layout with all optimizer state on the GPUs: why its source offloads it."""
    shape = MIXTURES[layout.model.removesuffix("-671B")]
    return training_peak_bytes(shape, replace(layout.layout, offloaded=0.0), micro_batch_tokens=_TRAIN_TOKENS)
