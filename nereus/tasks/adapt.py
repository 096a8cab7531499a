"""The controller at work in a live job: signals from what was measured, and a plan as model-stages.

step records, pool ─▶ signals ─▶ review (planner, pure) ─▶ stay | model-stages to move to
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from nereus.config import AdaptationConfig, CampaignConfig
from nereus.emu.cluster import PooledGpu
from nereus.emu.decoder import DecoderConfig
from nereus.emu.layout import Layout, Rank
from nereus.emu.stage import StageSpec
from nereus.errors import Infeasible
from nereus.planner.adapt import Controller, Review, first, on_survivors, review
from nereus.planner.broker import Bid, with_values
from nereus.planner.calibrate import Calibrator
from nereus.planner.calibration import NEUTRAL
from nereus.planner.cost import stage_time
from nereus.planner.fixed import parse_fix
from nereus.planner.lengths import LengthDistribution
from nereus.planner.policies.configured import policy_of
from nereus.planner.request import PlanRequest, StageOptions
from nereus.planner.seating import Seated
from nereus.planner.signals import Gpu, SignalHistory, Signals, Switch
from nereus.planner.stage_gains import StageGains
from nereus.planner.transition_time import FixedCosts
from nereus.planner.triggers import limits
from nereus.planner.workload import (
    Algorithm,
    Attention,
    Engines,
    Model,
    ModelShapes,
    ModelStage,
    Recompute,
    Schedule,
    Stage,
    Workload,
)
from nereus.tasks.batch_limit import configured_limit, longest_tokens
from nereus.tasks.device import device
from nereus.tasks.micro_batches import planned_rows
from nereus.tasks.planned_cluster import cache_limit, cluster_of
from nereus.tasks.stages import (
    CRITIC,
    REFERENCE,
    REWARD,
    TRAINING,
    StageModel,
    serving_of,
    with_sharing,
)

PLANNED_AS = {"ppo": Algorithm.PPO, "remax": Algorithm.REMAX}
"""What the planner takes an algorithm for by its model-stages; all others need those of GRPO."""
# Before anything was measured: votes, decision, a new generation, engines anew on this machine's CPUs.
TRANSITION_S, RESTART_S = 0.3, 10.0
# Beside it, what ends an engine and makes it anew around no weights, where a unit of generation changes:
# groups, cache, garbage; and on a GPU vLLM's capture of graphs, which was not measured.
REBUILD_S: Mapping[str, float] = {"torch": 0.0, "vllm": 1.0}
CAPTURE_S: Mapping[str, float] = {"torch": 0.0, "vllm": 5.0}
STAGE_OF_WORK = {
    "generate": Stage.GENERATION,
    "score reference": Stage.INFERENCE,
    "score values": Stage.INFERENCE,
    "score policy": Stage.TRAINING,
    "score frozen": Stage.TRAINING,
    "learn actor.training": Stage.TRAINING,
    "learn critic.training": Stage.TRAINING,
}
CALL_OF_STAGE = {
    ModelStage.ACTOR_TRAINING: "actor.training/train",
    ModelStage.CRITIC_TRAINING: "critic.training/train",
    ModelStage.CRITIC_INFERENCE: "critic.training/score",
    ModelStage.REFERENCE_INFERENCE: "reference.inference/score",
}
"""The calls whose terms the cost model has, too."""


@dataclass(kw_only=True)
class Adapter:
    """The controller of one job with what it remembers. Changed only between steps."""

    controller: Controller
    seated: Seated
    history: SignalHistory
    gains: StageGains
    last: Signals
    worth: tuple[tuple[int, int, int], Bid] | None = None
    """What GPUs were worth when they were last priced: for how many of how many, and since which planning."""
    raw: StageGains = field(default_factory=StageGains)
    """As `gains`, against the cost model as nothing has corrected it."""
    classes: Calibrator = field(default_factory=Calibrator)
    """What engines told of kernel classes and collectives."""

    def observe(self, signals: Signals) -> Review:
        """Review the plan in force before a step; the history goes on from here.

        Where a move is proposed, only what was observed is kept until `settle`: a move that is not made must
        leave its cause and the references as they were.
        """
        outcome = review(self.controller, self.seated, signals, self.history)
        self.last = signals
        if outcome.moves:
            thresholds = self.controller.thresholds
            self.history = self.history.observed(signals, limits(thresholds), thresholds.hysteresis)
        else:
            self.seated, self.history = outcome.seated, outcome.history
        return outcome

    def settle(self, outcome: Review, seconds: float) -> None:
        """A proposed transition was carried out and took this long."""
        assert outcome.decision is not None, "a transition was decided"
        self.seated = outcome.seated
        switch = Switch(
            step=self.last.step, predicted_s=outcome.decision.change.predicted_s, measured_s=seconds
        )
        self.history = outcome.history.with_transition(switch)

    def expected_s(self, stage: Stage) -> float:
        """Seconds that a stage takes under the plan in force: as predicted, or as last measured if longer."""
        return max(self.seated.plan.stage_s.get(stage, 0.0), self.last.stage_s.get(str(stage), 0.0))

    def without(self, pool: tuple[PooledGpu, ...], step: int) -> Seated:
        """The best plan on the GPUs that are left, profitable or not; it is in force from here on."""
        signals = replace(self.last, step=step, now_s=time.time(), pool=gpus_of(pool), peak_memory_bytes={})
        self.seated, self.history = on_survivors(self.controller, self.seated, signals, self.history)
        self.last = signals
        return self.seated


def start_adapter(
    config: CampaignConfig,
    adaptation: AdaptationConfig,
    models: Mapping[str, StageModel],
    pool: tuple[PooledGpu, ...],
    *,
    step: int,
    prompt_tokens: int,
) -> Adapter:
    """Choose the first plan for the pool; `prompt_tokens` has the longest prompt. Raises Infeasible, saying
    what would help, when none fits.
    """
    controller = Controller(
        request=request_of(config, models, prompt_tokens),
        policy=policy_of(adaptation.policy),
        thresholds=adaptation.thresholds,
        costs=costs_of(config),
        drain_margin_s=adaptation.drain_margin_s,
        in_segments=config.asynchrony is not None and config.asynchrony.segment_tokens is not None,
    )
    response = controller.request.workload.response
    signals = Signals(step=step, now_s=time.time(), response=response, pool=gpus_of(pool))
    seated, history = first(controller, signals)
    return Adapter(controller=controller, seated=seated, history=history, gains=StageGains(), last=signals)


def with_worth(adapter: Adapter, bid: Bid, pool: tuple[Gpu, ...], unit: int) -> Bid:
    """The bid with what GPUs are worth to the job, in units of so many, by the best plans for them.

    Priced again when the job holds another number, or has planned anew because something drifted.
    """
    key = (bid.held, bid.most, adapter.history.planned_at)
    if adapter.worth is None or adapter.worth[0] != key:
        staying = [gpu for gpu in pool if gpu.drain_s is None]
        next_id, node = max(gpu.id for gpu in pool) + 1, max(gpu.node for gpu in pool)
        staying += [Gpu(id=next_id + i, node=node) for i in range(bid.most)]

        def step_s(num_gpus: int) -> float | None:
            signals = replace(adapter.last, pool=tuple(staying[:num_gpus]), peak_memory_bytes={})
            return _best_step_s(adapter.controller, signals)

        adapter.worth = key, with_values(bid, step_s, unit=unit)
    known = adapter.worth[1]
    return replace(bid, gain=known.gain, take=known.take, loss=known.loss, give=known.give)


def _best_step_s(controller: Controller, signals: Signals) -> float | None:
    """Seconds of a step under the best plan for a pool; None where none fits."""
    try:
        return first(replace(controller, explains=False), signals)[0].plan.step_s
    except Infeasible:
        return None


def costs_of(config: CampaignConfig) -> FixedCosts:
    """What a transition takes beside its bytes, with the engines of this campaign."""
    engine = config.engines.generation
    rebuild_s = REBUILD_S[engine] + (CAPTURE_S[engine] if device(config) == "cuda" else 0.0)
    return FixedCosts(transition_s=TRANSITION_S, restart_s=RESTART_S + rebuild_s, generation_s=rebuild_s)


def request_of(config: CampaignConfig, models: Mapping[str, StageModel], prompt_tokens: int) -> PlanRequest:
    """The planning question of a campaign. The critic serves and trains with one layout; rows stay as
    configured unless nothing fits so (`planner.held.leaner`); a limit in tokens counts as the longest rows
    that it holds.
    """
    rows = planned_rows(configured_limit(config), longest_tokens(config))
    shapes = {name: stage.model for name, stage in models.items()}
    recompute = Recompute.FULL if config.models.recompute else Recompute.NONE
    limit = config.sampling.max_new_tokens
    workload = Workload(
        algorithm=PLANNED_AS.get(config.algorithm.kind, Algorithm.GRPO),
        models=ModelShapes(
            actor=shapes[TRAINING],
            critic=shapes.get(CRITIC),
            reference=shapes.get(REFERENCE),
            reward=shapes.get(REWARD),
        ),
        num_prompts=config.batch.prompts,
        num_samples=config.batch.samples,
        prompt_tokens=prompt_tokens,
        # Until lengths were measured: a quarter of the limit on average, with a tail up to it.
        response=LengthDistribution.from_mean_p95_max(limit / 4, limit * 3 / 4, limit),
        dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.models.precision.value],
        schedule=Schedule.ahead_by(config.staleness),
        recompute=recompute,
        micro_batch=rows,
        num_epochs=config.batch.epochs,
        num_mini_batches=config.batch.mini_batches,
        old_logprobs=config.rescores,
        zero1=config.optimizer.zero1,
        frozen_reference=config.scores_reference_frozen and config.algorithm.kl is not None,
        engines=_engines(config, shapes[TRAINING]),
        attention=_attention(config),
    )
    return PlanRequest(
        workload=workload,
        cluster=cluster_of(config),
        share=frozenset({Model.CRITIC}) if CRITIC in models else frozenset(),
        options=StageOptions(
            train_micro_batches=(rows,),
            score_micro_batches=(rows,),
            recomputes=(recompute,),
            max_residents=(None,),
        ),
        fixed=() if config.adaptation is None else tuple(map(parse_fix, config.adaptation.fixed)),
    )


def _attention(config: CampaignConfig) -> Attention:
    """Megatron's own layers make score matrices; those of Transformer Engine, and other engines, do not."""
    if config.engines.training != "megatron":
        return Attention.FUSED
    fused = device(config) == "cuda" and find_spec("transformer_engine") is not None
    return Attention.FUSED if fused else Attention.EAGER


def _engines(config: CampaignConfig, actor: DecoderConfig) -> Engines:
    """The campaign's engines; what vLLM keeps is counted with its largest cache."""
    names, serving = config.engines, None
    if names.generation == "vllm":
        serving = serving_of(config, actor)
        serving = replace(serving, kv_cache_bytes=serving.kv_cache_bytes or cache_limit(config))
    return Engines(
        training=names.training,
        generation=names.generation,
        on_cpu=device(config) == "cpu",
        serving=serving,
    )


def gpus_of(pool: tuple[PooledGpu, ...]) -> tuple[Gpu, ...]:
    """The pool as the planner counts it: a worker's rank is its GPU's id."""
    return tuple(Gpu(id=gpu.rank, node=gpu.node, drain_s=gpu.drain_at_s) for gpu in pool)


def signals_after(
    adapter: Adapter,
    *,
    step: int,
    lengths_b: Tensor,
    work_s: Mapping[str, float],
    terms_s: Mapping[str, Mapping[str, float]],
    memory_bytes: Mapping[Rank, int],
    pool: tuple[PooledGpu, ...],
    changes_s: tuple[float, ...] = (),
) -> Signals:
    """What the step before `step` showed. `work_s` are seconds of the busiest worker by kind of work,
    `terms_s` those of kernel classes and collectives by call, `memory_bytes` peaks by worker, `changes_s`
    seconds from now until known changes of the pool.
    """
    response = LengthDistribution.from_lengths(lengths_b.to(torch.float64).numpy())
    measured = dict.fromkeys(Stage, 0.0)
    for name, seconds in work_s.items():
        if name in STAGE_OF_WORK:
            measured[STAGE_OF_WORK[name]] += seconds
    neutral = neutral_terms(adapter, response)
    raw = {
        stage: max(
            (sum(terms.values()) for item, terms in neutral.items() if item.stage is stage), default=0.0
        )
        for stage in Stage
    }
    adapter.raw = adapter.raw.observed(_ratios(measured, raw), NEUTRAL)
    predicted = adapter.seated.plan.stage_s
    adapter.gains = adapter.gains.observed(_ratios(measured, predicted), adapter.last.calibration)
    for item, terms in neutral.items():
        if told := terms_s.get(CALL_OF_STAGE.get(item, "")):
            adapter.classes = adapter.classes.with_terms(terms, told)
    learned = {name: gain.value for name, gain in adapter.classes.gains.items()}
    now_s = time.time()
    return Signals(
        step=step,
        now_s=now_s,
        response=response,
        pool=gpus_of(pool),
        peak_memory_bytes=memory_bytes,
        stage_s={str(stage): seconds for stage, seconds in measured.items()},
        efficiency=adapter.raw.efficiency,
        calibration=replace(adapter.gains.calibration, **learned),
        arrivals_s=tuple(now_s + seconds for seconds in changes_s),
    )


def neutral_terms(adapter: Adapter, response: LengthDistribution) -> dict[ModelStage, Mapping[str, float]]:
    """Seconds by term of every model-stage under the plan in force, by the uncorrected cost model."""
    workload, seated = adapter.controller.request.workload.with_response(response), adapter.seated
    return {
        item.model_stage: stage_time(
            item.model_stage,
            item.tp,
            item.pp,
            item.dp,
            item.ep,
            item.cp,
            workload=item.option.apply(workload),
            cluster=seated.cluster,
            gpu_kind=item.gpu_kind,
        ).terms
        for item in seated.plan.assignments
    }


def _ratios(measured: Mapping[Stage, float], predicted: Mapping[Stage, float]) -> dict[Stage, float]:
    """Measured over predicted seconds, where both are known."""
    return {
        stage: measured[stage] / predicted[stage]
        for stage in Stage
        if measured[stage] > 0 and predicted.get(stage, 0.0) > 0
    }


def seated_stages(stages: Mapping[str, StageSpec], seated: Seated) -> dict[str, StageSpec]:
    """The model-stages under a seated plan: its units, and its options."""
    items = {item.model_stage: item for item in seated.plan.assignments}
    out: dict[str, StageSpec] = {}
    for name, spec in stages.items():
        item, model = items[ModelStage(name)], spec.tensors
        units = tuple(
            Layout.make(
                model,
                tp=item.tp,
                pp=item.pp,
                ep=item.ep,
                cp=item.cp,
                ranks=unit,
                layers=item.layers,
            )
            for unit in seated.units(item)
        )
        out[name] = replace(spec, units=units)
    return with_options(with_sharing(out), seated)


def with_options(stages: Mapping[str, StageSpec], seated: Seated) -> dict[str, StageSpec]:
    """The model-stages, units as they are, with the micro-batches, recomputation and sequences held at once
    of a plan.
    """
    options = {item.model_stage: item.option for item in seated.plan.assignments}
    out: dict[str, StageSpec] = {}
    for name, spec in stages.items():
        option = options[ModelStage(name)]
        if spec.role == "generation":
            out[name] = replace(spec, resident_rows=option.max_resident)
        elif spec.role == "inference":
            out[name] = replace(spec, score_rows=option.micro_batch)
        else:
            scored = options.get(ModelStage.CRITIC_INFERENCE) if name == CRITIC else None
            out[name] = replace(
                spec,
                train_rows=option.micro_batch,
                score_rows=None if scored is None else scored.micro_batch,
                recompute=option.recompute is Recompute.FULL,
            )
    return out
