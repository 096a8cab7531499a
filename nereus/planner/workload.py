"""What one training step has to do: the algorithm, the models, the batch and the lengths of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from nereus.emu.decoder import DecoderConfig
from nereus.emu.engine_limits import EngineName, Problem, problem_with
from nereus.emu.serving import Serving
from nereus.errors import ConfigError, explain
from nereus.planner.lengths import LengthDistribution


class Algorithm(StrEnum):
    """How advantages are made; it decides which models take part."""

    PPO = "ppo"
    GRPO = "grpo"
    REMAX = "remax"


class Schedule(StrEnum):
    """How generation and training overlap in time."""

    SYNC = "sync"
    ONE_STEP_OFF = "one-step-off"
    ASYNC = "async"

    @classmethod
    def ahead_by(cls, steps: int) -> Schedule:
        """The schedule in which generation is at most so many steps ahead of training."""
        return {0: cls.SYNC, 1: cls.ONE_STEP_OFF}.get(steps, cls.ASYNC)

    @property
    def overlaps(self) -> bool:
        """Whether generation runs beside the other stages, on GPUs of its own (I17)."""
        return self is not Schedule.SYNC


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Attention(StrEnum):
    """How a training engine computes attention: fused, or through score matrices in 16 or 32 bits."""

    FUSED = "fused"
    EAGER = "eager"
    EAGER_FP32 = "eager-fp32"

    @property
    def moved_bytes(self) -> int:
        """Bytes that each score moves in a forward pass, counted in the usual eager code.

        16 bits: product 2, mask 4, clamp 4, soft-max into 32 bits 6, cast 6, product 2. 32 bits: product 4,
        mask 8, soft-max 8, cast 6, product 2.
        """
        return {"fused": 0, "eager": 24, "eager-fp32": 28}[self.value]

    @property
    def saved_bytes(self) -> int:
        """Bytes that each score leaves for the backward pass: scores, soft-max, 16-bit probabilities, mask.

        16 bits: 2 + 2 + 1 (Korthikanti et al., arXiv 2205.05198). 32 bits: 4 + 4 + 2 + 1.
        """
        return {"fused": 0, "eager": 5, "eager-fp32": 11}[self.value]


class Pipeline(StrEnum):
    """The order of micro-batches in a training pipeline: equal time, different memory."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


class Model(StrEnum):
    """The four models of an RL job."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"


class Stage(StrEnum):
    """The three stages of a step, in the order in which a synchronous step runs them."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"


class ModelStage(StrEnum):
    """One model in one stage: what a plan gives a layout to."""

    ACTOR_GENERATION = "actor.generation"
    CRITIC_INFERENCE = "critic.inference"
    REFERENCE_INFERENCE = "reference.inference"
    REWARD_INFERENCE = "reward.inference"
    ACTOR_TRAINING = "actor.training"
    CRITIC_TRAINING = "critic.training"

    @property
    def model(self) -> Model:
        """The model's name, the part before the dot."""
        return Model(self.value.split(".")[0])

    @property
    def stage(self) -> Stage:
        """The stage's name, the part after the dot."""
        return Stage(self.value.split(".")[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """The shape of each model; None where the job has no such model (a rule gives the reward, no KL term).

    A critic or reward model has a scalar head: `shape.with_head("value")`.
    """

    actor: DecoderConfig
    critic: DecoderConfig | None = None
    reference: DecoderConfig | None = None
    reward: DecoderConfig | None = None

    @classmethod
    def same(cls, shape: DecoderConfig, algorithm: Algorithm, *, reward: bool = True) -> Self:
        """Every model that the algorithm uses has this shape; `reward` False: a rule gives the reward."""
        scalar = shape.with_head("value")
        return cls(
            actor=shape,
            critic=scalar if algorithm is Algorithm.PPO else None,
            reference=shape,
            reward=scalar if reward else None,
        )

    def of(self, model: Model) -> DecoderConfig | None:
        """The shape of one model."""
        return {
            Model.ACTOR: self.actor,
            Model.CRITIC: self.critic,
            Model.REFERENCE: self.reference,
            Model.REWARD: self.reward,
        }[model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """What runs the stages, as far as plans depend on it. Inference runs on the engine that trains.

    `serving` is for a generation engine with weights of its own and a KV cache that is allocated while it
    lives; None: generation takes memory only while it runs.
    """

    training: EngineName = "torch"
    generation: EngineName = "torch"
    on_cpu: bool = False
    serving: Serving | None = None

    def of(self, stage: Stage) -> EngineName:
        """The engine of a stage."""
        return self.generation if stage is Stage.GENERATION else self.training

    @property
    def share_weights(self) -> bool:
        """Whether generation can read the weights that training writes: both store them alike."""
        return self.generation == "torch" and self.training in ("torch", "deepspeed")


TORCH = Engines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's work. All sizes are of the whole job, `micro_batch` and `max_resident` are of one unit.

    `grad_bytes` is the size of one gradient element (2 or 4); `num_mini_batches` is the number of
    optimizer steps an epoch is cut into; `max_resident` caps how many sequences a generation unit holds
    at once (None: all of its share), which is the knob that trades KV memory for time;
    `logits_chunk_tokens` is how many tokens' logits live at once (None: a whole micro-batch);
    `attention` is how the training engine computes attention, `pipeline` the order of its micro-batches;
    `zero1`: the units of a trained model share its optimizer state. `old_logprobs`: the training engine
    scores the responses once more before it trains. `frozen_reference`: it scores them by the actor without
    its adapters, which is the reference. `engines` bound the layouts and the memory.
    """

    algorithm: Algorithm
    models: ModelShapes
    num_prompts: int
    num_samples: int = 1
    prompt_tokens: int
    response: LengthDistribution
    dtype: str = "bfloat16"
    schedule: Schedule = Schedule.SYNC
    recompute: Recompute = Recompute.FULL
    micro_batch: int = 1
    max_resident: int | None = None
    num_epochs: int = 1
    num_mini_batches: int = 1
    grad_bytes: int = 4
    old_logprobs: bool = True
    attention: Attention = Attention.FUSED
    pipeline: Pipeline = Pipeline.ONE_F_ONE_B
    logits_chunk_tokens: int | None = 2048
    zero1: bool = False
    frozen_reference: bool = False
    engines: Engines = TORCH

    def __post_init__(self) -> None:
        positive = {
            "num_prompts": self.num_prompts,
            "num_samples": self.num_samples,
            "prompt_tokens": self.prompt_tokens,
            "micro_batch": self.micro_batch,
            "num_epochs": self.num_epochs,
            "num_mini_batches": self.num_mini_batches,
            "max_resident": 1 if self.max_resident is None else self.max_resident,
            "logits_chunk_tokens": 1 if self.logits_chunk_tokens is None else self.logits_chunk_tokens,
        }
        wrong = [f"{name} {value}" for name, value in positive.items() if value < 1]
        if wrong:
            raise ConfigError(
                explain("cannot build a workload", values=", ".join(wrong), rule="must be >= 1")
            )
        if self.algorithm is Algorithm.PPO and self.models.critic is None:
            raise ConfigError(explain("cannot build a workload", rule="PPO needs a critic's shape"))
        if self.dtype not in _DTYPE_BYTES:
            raise ConfigError(
                explain("cannot build a workload", values=self.dtype, rule=f"one of {[*_DTYPE_BYTES]}")
            )

    @property
    def shares_weights(self) -> bool:
        """Whether generation may read the arenas that training writes; adapters it wants added to them."""
        return self.engines.share_weights and self.models.actor.lora is None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight or activation element."""
        return _DTYPE_BYTES[self.dtype]

    @property
    def num_sequences(self) -> int:
        """Sequences that are scored and trained on in one step."""
        return self.num_prompts * self.num_samples

    @property
    def num_generated(self) -> int:
        """Sequences generated in one step; ReMax adds a greedy baseline for every prompt."""
        extra = 1 if self.algorithm is Algorithm.REMAX else 0
        return self.num_prompts * (self.num_samples + extra)

    @property
    def most_resident(self) -> int | None:
        """Sequences that a generation unit holds at once at most; None: all of its share."""
        serving = self.engines.serving
        rows = None if serving is None else serving.rows
        return min((size for size in (self.max_resident, rows) if size is not None), default=None)

    def problem_at(
        self, model_stage: ModelStage, tp: int, pp: int, ep: int = 1, cp: int = 1
    ) -> Problem | None:
        """Why the engine of a model-stage cannot run it at (tp, pp, ep, cp); None where it can."""
        engines = self.engines
        engine = engines.of(model_stage.stage)
        return problem_with(engine, self.shape(model_stage), tp, pp, ep, cp, on_cpu=engines.on_cpu)

    @property
    def sequence_tokens(self) -> float:
        """Mean length of prompt and response together."""
        return self.prompt_tokens + self.response.mean

    @property
    def max_sequence_tokens(self) -> float:
        """Longest prompt and response together."""
        return self.prompt_tokens + self.response.maximum

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """The model-stages that take part, in stage order."""
        critic = self.algorithm is Algorithm.PPO
        return tuple(
            stage
            for stage in ModelStage
            if self.models.of(stage.model) is not None and (critic or stage.model is not Model.CRITIC)
        )

    def shape(self, model_stage: ModelStage) -> DecoderConfig:
        """The decoder of a model-stage; raises ConfigError where the job has none."""
        shape = self.models.of(model_stage.model)
        if shape is None:
            raise ConfigError(explain(f"no shape for {model_stage}", rule="this job does not use that model"))
        return shape

    def with_options(
        self,
        *,
        micro_batch: int | None = None,
        recompute: Recompute | None = None,
        max_resident: int | None = None,
    ) -> Workload:
        """The same work with another micro-batch, recompute choice or residency; None keeps it."""
        return replace(
            self,
            micro_batch=self.micro_batch if micro_batch is None else micro_batch,
            recompute=self.recompute if recompute is None else recompute,
            max_resident=self.max_resident if max_resident is None else max_resident,
        )

    def with_response(self, response: LengthDistribution) -> Workload:
        """The same work with other response lengths."""
        return replace(self, response=response)


_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
