"""Stage times of one candidate or of arrays of them, and the critical path of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.candidates import as_candidates
from nereus.planner.collective_time import point_to_point_s
from nereus.planner.forward_time import inference_terms, training_terms
from nereus.planner.generation_time import generation_terms
from nereus.planner.layer_time import BF16, FP32, Place
from nereus.planner.profile import ClusterProfile, LinkClass
from nereus.planner.shard_size import rank_parameters
from nereus.planner.workload import ModelStage, Schedule, Stage, Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one model-stage; `terms` sum to `latency_s`."""

    latency_s: float
    terms: Mapping[str, float]

    @property
    def bottleneck(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """`StageCost` of many candidates: `latency_s` has the candidates' shape, and so has every term."""

    latency_s: Floats
    terms: Mapping[str, Floats]

    def at(self, index: int) -> StageCost:
        """One candidate's cost."""
        return StageCost(
            latency_s=float(self.latency_s[index]),
            terms={name: float(term[index]) for name, term in self.terms.items()},
        )


def stage_times(
    model_stage: ModelStage,
    tp: ArrayLike,
    pp: ArrayLike,
    dp: ArrayLike,
    ep: ArrayLike = 1.0,
    cp: ArrayLike = 1.0,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration = NEUTRAL,
) -> StageCosts:
    """Seconds of a model-stage for arrays of (tp, pp, dp, ep, cp); they broadcast to one dimension.

    Assumes that the sizes are at least 1 and that the layouts fit the model (heads, layers);
    `cluster.pool(gpu_kind)` decides how many GPUs share a node. Raises ConfigError for a model the
    workload lacks or an unknown GPU kind.
    """
    place = Place(
        shape=workload.shape(model_stage),
        cluster=cluster,
        gpu_kind=gpu_kind,
        calibration=calibration,
        precision=FP32 if workload.dtype == "float32" else BF16,
    )
    sizes = as_candidates(tp, pp, dp, ep, cp)
    if model_stage.stage is Stage.GENERATION:
        terms = generation_terms(place, workload, *sizes[:4])
    elif model_stage.stage is Stage.INFERENCE:
        terms = inference_terms(place, workload, *sizes)
    else:
        terms = training_terms(place, workload, *sizes)
        again = {"old_logprobs": workload.old_logprobs, "frozen_reference": workload.frozen_reference}
        for name in [name for name, yes in again.items() if yes and model_stage is ModelStage.ACTOR_TRAINING]:
            within = replace(place, calibration=calibration.scores_while_training)
            scored = inference_terms(within, workload, *sizes)
            terms[name] = np.asarray(sum(scored.values()))
    return StageCosts(latency_s=np.asarray(sum(terms.values())), terms=terms)


def stage_time(
    model_stage: ModelStage,
    tp: int,
    pp: int,
    dp: int,
    ep: int = 1,
    cp: int = 1,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration = NEUTRAL,
) -> StageCost:
    """Seconds of a model-stage with `dp` units of layout (tp, pp, ep, cp)."""
    return stage_times(
        model_stage,
        tp,
        pp,
        dp,
        ep,
        cp,
        workload=workload,
        cluster=cluster,
        gpu_kind=gpu_kind,
        calibration=calibration,
    ).at(0)


def publish_times(
    model_stage: ModelStage,
    tp: ArrayLike,
    pp: ArrayLike,
    ep: ArrayLike = 1.0,
    *,
    workload: Workload,
    cluster: ClusterProfile,
    gpu_kind: str,
    calibration: Calibration = NEUTRAL,
) -> Floats:
    """Seconds to bring a model's weights into the layout (tp, pp, ep) of `model_stage` from another layout.

    Every rank of the receiver needs at most its own shard; it crosses the network when the cluster has
    more than one node.
    """
    link = LinkClass.SCALE_UP if _one_node(cluster) else LinkClass.SCALE_OUT
    gain = calibration.scale_up if link is LinkClass.SCALE_UP else calibration.scale_out
    shard = workload.dtype_bytes * rank_parameters(workload.shape(model_stage), tp, pp, ep)
    return np.asarray(point_to_point_s(cluster, gpu_kind, shard, link) * gain)


def _one_node(cluster: ClusterProfile) -> bool:
    return len(cluster.pools) == 1 and cluster.pools[0].num_nodes == 1


def step_time(
    latencies_s: Mapping[ModelStage, float],
    schedule: Schedule,
    *,
    publish_s: Mapping[ModelStage, float] | None = None,
) -> float:
    """Seconds of one step: the critical path over its stages.

    Models of one stage run side by side, so a stage lasts as long as its slowest model. Synchronous: the
    stages follow one another. One step off and asynchronous: generation runs beside inference and
    training, so the longer side counts. `publish_s` holds the weight transfer into each model-stage that
    sits in another layout (generation, inference); it is paid after training in every schedule.
    """
    published = publish_s or {}
    longest = {
        stage: max((time for name, time in latencies_s.items() if name.stage is stage), default=0.0)
        for stage in Stage
    }
    consumer = longest[Stage.INFERENCE] + longest[Stage.TRAINING]
    transfer = sum(published.values())
    if schedule.overlaps:
        return max(longest[Stage.GENERATION], consumer) + transfer
    return longest[Stage.GENERATION] + consumer + transfer
