"""How far predicted iteration times and peak bytes are from measured multi-node training plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus.emu.decoder import DecoderConfig
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.forward_time import training_terms
from nereus.planner.layer_time import Place
from nereus.planner.lengths import LengthDistribution
from nereus.planner.measured import read_rows
from nereus.planner.profile import ClusterProfile
from nereus.planner.scalars import TRAINING, features, fit_scalars
from nereus.planner.stage_bytes import training_bytes
from nereus.planner.workload import Algorithm, Attention, ModelShapes, Recompute, Workload

Floats = NDArray[np.float64]

SEQUENCE_TOKENS = 2048
KIND = "GH200-96"
_CLUSTER = ClusterProfile.parse(f"64x4x{KIND}")


def _gpt(vocab: int, hidden: int, layers: int, heads: int) -> DecoderConfig:
    """A GPT block has two [h, 4h] matrices where a Llama block has three [h, f]: f = 8h/3 has the same
    weights.
    """
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=8 * hidden // 3,
    )


SHAPES = {
    "GPT-Neo-2.7B": _gpt(50257, 2560, 32, 20),
    "OPT-350M": _gpt(50272, 1024, 24, 16),
}


# Neither uses a fused kernel; GPT-Neo computes its scores in 32 bits.
ATTENTION = {"GPT-Neo-2.7B": Attention.EAGER_FP32, "OPT-350M": Attention.EAGER}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One measured training plan. `split` are decoder layers a stage (the file counts embedding and head
    as layers).
    """

    name: str
    model: str
    tp: int
    pp: int
    dp: int
    split: tuple[int, ...]
    micro_batch: int
    global_batch: int
    seconds: float
    peak_bytes: int

    @property
    def shape(self) -> DecoderConfig:
        """The model's shape."""
        return SHAPES[self.model]

    @property
    def workload(self) -> Workload:
        """Its iteration as a workload: fp16, scores materialised, nothing recomputed, whole logits."""
        return Workload(
            algorithm=Algorithm.GRPO,
            models=ModelShapes(actor=self.shape),
            num_prompts=self.global_batch,
            prompt_tokens=1,
            response=LengthDistribution.constant(SEQUENCE_TOKENS - 1),
            recompute=Recompute.NONE,
            micro_batch=self.micro_batch,
            attention=ATTENTION[self.model],
            grad_bytes=6,  # 16-bit gradients and the 32-bit copy that the optimizer works on
            logits_chunk_tokens=None,
            old_logprobs=False,
        )

    def predicted_s(self, calibration: Calibration) -> float:
        """Seconds of one iteration."""
        place = Place(shape=self.shape, cluster=_CLUSTER, gpu_kind=KIND, calibration=calibration)
        sizes = (np.array([float(size)]) for size in (self.tp, self.pp, self.dp))
        terms = training_terms(place, self.workload, *sizes, split=self.split)
        return float(sum(term[0] for term in terms.values()))

    @property
    def predicted_bytes(self) -> float:
        """Peak bytes on the fullest GPU."""
        sizes = (np.array([float(size)]) for size in (self.tp, self.pp, self.dp))
        return float(
            sum(
                term[0]
                for term in training_bytes(self.shape, self.workload, *sizes, split=self.split).values()
            )
        )


def read_plans(folder: Path) -> tuple[PlanRow, ...]:
    """The GH200 plans of `folder`, without the one row whose iteration time repeats its reduction time."""
    plans = []
    for row in read_rows(folder / "validation_plans.csv"):
        if row["gpu"] != "GH-96" or row["file"].endswith("GPT-NEO/N4/plan_config_N4_D4.json"):
            continue
        layers = [int(count) for count in row["layers"].split("|")]
        layers[0] -= 1  # the embedding
        layers[-1] -= 1  # the head
        plans.append(
            PlanRow(
                name=row["file"],
                model=row["model"],
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                dp=int(row["dp"]),
                split=tuple(layers),
                micro_batch=int(row["mbs"]),
                global_batch=int(row["gbs"]),
                seconds=float(row["real_iter_s"]),
                peak_bytes=int(row["max_mem_B"]),
            )
        )
    return tuple(plans)


def leave_one_out(plans: Sequence[PlanRow]) -> Floats:
    """Seconds of every plan, predicted with four scalars fitted to the other plans."""
    design = np.array([features(plan.predicted_s, TRAINING) for plan in plans])
    measured = np.array([plan.seconds for plan in plans])
    predicted = np.empty(len(plans))
    for index in range(len(plans)):
        others = np.arange(len(plans)) != index
        predicted[index] = design[index] @ fit_scalars(design[others], measured[others])
    return predicted


def uncalibrated(plans: Sequence[PlanRow]) -> Floats:
    """Seconds with the tables alone."""
    return np.array([plan.predicted_s(NEUTRAL) for plan in plans])


def constant_mfu(plans: Sequence[PlanRow]) -> Floats:
    """Leave-one-out of the one-constant model: FLOPs over GPUs times peak times a fitted utilisation."""
    peak = _CLUSTER.pool(KIND).gpu.peak_flops
    ideal = np.array(
        [
            6
            * (
                12 * plan.shape.hidden_size**2 * plan.shape.num_layers
                + plan.shape.vocab_size * plan.shape.hidden_size
            )
            * SEQUENCE_TOKENS
            * plan.global_batch
            / (plan.tp * plan.pp * plan.dp * peak)
            for plan in plans
        ]
    )
    measured = np.array([plan.seconds for plan in plans])
    ratio = np.log(measured / ideal)
    others = np.array([np.median(np.delete(ratio, index)) for index in range(len(plans))])
    return np.asarray(ideal * np.exp(others))
