"""The configuration: one frozen tree, unknown keys refused, built once at the edge.

`CampaignConfig` is the whole; each component receives its own part. Defaults live on the fields and nowhere
else. The tree renders as a form in the Prefect UI, so every field has a title-worthy name and a description,
closed sets are enums, and alternatives are unions told apart by `kind`.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Frozen(BaseModel):
    """Base of the tree: frozen, no unknown keys, defaults validated too."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )


# ---------------------------------------------------------------------------------------------- models
class Precision(StrEnum):
    """Dtype of weights. Half precision keeps an fp32 master copy; gradients and moments are fp32 always."""

    fp32 = "fp32"
    bf16 = "bf16"


class ModelsConfig(_Frozen):
    """Folders of the models, in Hugging Face form (config.json, *.safetensors, tokenizer files)."""

    actor: str
    """The policy to train."""
    critic: str | None = None
    """The critic's initial trunk; the actor's when absent. Only PPO has a critic."""
    reference: str | None = None
    """The frozen reference policy; the actor's initial weights when absent. Used only with a KL term."""
    tokenizer: str | None = None
    """Folder of the tokenizer; the actor's when absent."""
    precision: Precision = Precision.fp32
    """Dtype of all models' weights."""
    recompute: bool = False
    """Recompute activations in the backward pass: a third more work, far less memory."""


# ------------------------------------------------------------------------------------------------ data
class FileData(_Frozen):
    """Prompts from JSONL or parquet: a file, a folder of shards, or a Hugging Face datasets folder."""

    kind: Literal["file"] = "file"
    path: str
    """File or folder."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of chat messages with role and content."""
    answer: str | None = None
    """Column of the reference answer; by default the first of ground_truth, answer,
    reward_model.ground_truth.
    """
    suffix: str = ""
    """Text appended to every prompt (for chat prompts, to the last message)."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many prompts."""


class PythonData(_Frozen):
    """Prompts from a Python function that returns an iterable of records with `prompt` and, if any,
    `answer`.
    """

    kind: Literal["python"] = "python"
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class ReasoningGymData(_Frozen):
    """A task of the reasoning-gym package, by name."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Name of the task, e.g. `countdown`."""
    size: int = Field(default=1000, ge=1)
    """Number of problems."""
    seed: int = 42
    """Seed of the problems."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""


class LongPrompts(StrEnum):
    """What to do with a prompt above the limit."""

    skip = "skip"
    truncate_left = "truncate_left"


class PromptsConfig(_Frozen):
    """Where prompts come from, and how they become tokens."""

    source: Annotated[FileData | PythonData | ReasoningGymData, Field(discriminator="kind")]
    """The source of prompts."""
    chat_template: bool = False
    """Apply the tokenizer's chat template; otherwise prompts are plain text."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, in tokens."""
    too_long: LongPrompts = LongPrompts.skip
    """What to do with longer ones: skip and count them, or keep their last tokens."""
    shuffle: bool = True
    """Shuffle the prompts anew in every epoch, by the campaign's seed."""


# ---------------------------------------------------------------------------------------------- rewards
class PythonReward(_Frozen):
    """A reward from a Python function, run in processes of its own with a time limit."""

    kind: Literal["python"] = "python"
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call, seconds. A call over it is a missing reward."""
    workers: int = Field(default=1, ge=1)
    """Number of reward processes."""
    batched: bool = False
    """Call the function once with lists instead of once a response."""


class ReasoningGymReward(_Frozen):
    """The score that the reasoning-gym task itself gives; prompts must come from reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one score, seconds."""
    workers: int = Field(default=1, ge=1)
    """Number of reward processes."""


class ModelReward(_Frozen):
    """A reward model: the value of its scalar head at the last token of the response."""

    kind: Literal["model"] = "model"
    path: str
    """Folder of the reward model."""


# -------------------------------------------------------------------------------------------- algorithms
class Aggregation(StrEnum):
    """How token losses become one number, always by global counts."""

    token_mean = "token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_mean = "seq-mean-token-mean"
    seq_mean_token_sum_norm = "seq-mean-token-sum-norm"


class KlEstimator(StrEnum):
    """Estimator of the KL divergence from per-token log-probabilities."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlConfig(_Frozen):
    """A KL term to the reference policy."""

    where: Literal["reward", "loss"] = "loss"
    """Subtract it from the reward, token by token, or add it to the loss."""
    coefficient: float = Field(default=0.001, ge=0)
    """Its weight."""
    estimator: KlEstimator = KlEstimator.k3
    """The estimator; k1 in the loss has zero expected gradient and is refused."""

    @model_validator(mode="after")
    def _k1_not_in_loss(self) -> KlConfig:
        if self.where == "loss" and self.estimator == KlEstimator.k1:
            raise ValueError(
                "estimator k1 in the loss has zero expected gradient; use k2 or k3, or where: reward"
            )
        return self


class _Policy(_Frozen):
    """What every algorithm's policy loss has."""

    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound of the loss for negative advantages (verl's clip_ratio_c); none switches it off."""
    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """KL term to the reference policy; none runs without a reference model."""
    aggregation: Aggregation = Aggregation.token_mean
    """How token losses become one number."""


class PpoConfig(_Policy):
    """Proximal policy optimisation with a critic (Schulman et al. 2017)."""

    kind: Literal["ppo"] = "ppo"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    value_clip: float = Field(default=0.5, gt=0)
    """Clip of the critic's change in the value loss."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """The critic's learning rate."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic learns."""


class GrpoConfig(_Policy):
    """Group-relative policy optimisation (DeepSeekMath 2024): the group's mean is the baseline."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class RemaxConfig(_Policy):
    """ReMax (Li et al. 2024): the reward of the greedy answer is the baseline."""

    kind: Literal["remax"] = "remax"


class BatchConfig(_Frozen):
    """How many prompts and rows a step has, and how they are cut for the optimizer."""

    prompts: int = Field(default=8, ge=1)
    """Prompts a step."""
    samples: int = Field(default=8, ge=1)
    """Responses a prompt."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's rows."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass."""
    micro_batch_rows: int = Field(default=8, ge=1)
    """Rows of one forward and backward pass on one unit."""


class OptimizerConfig(_Frozen):
    """AdamW with gradient clipping."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """The actor's learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up, down to zero at the last step for cosine and linear."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Clip of the global gradient norm; none does not clip."""


class SamplingConfig(_Frozen):
    """How the policy answers."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; scoring and training use it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the distribution that is sampled from."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own end-of-sequence tokens."""


# ----------------------------------------------------------------------------------------------- cluster
class StagePlan(_Frozen):
    """Layout, number of units and GPUs of one model-stage."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    dp: int = Field(default=1, ge=1)
    """Number of units (data-parallel replicas)."""
    gpus: tuple[int, ...] | None = None
    """The GPUs, unit after unit in layout order; by default the first tp*pp*dp of the cluster."""
    layers: tuple[int, ...] | None = None
    """Layers of every pipeline stage; by default as even as possible."""

    @property
    def num_gpus(self) -> int:
        """GPUs that the model-stage occupies."""
        return self.tp * self.pp * self.dp

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """The GPUs, unit after unit in layout order."""
        return tuple(range(self.num_gpus)) if self.gpus is None else self.gpus

    @property
    def text(self) -> str:
        """E.g. `tp2 pp1 dp2`."""
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"

    @model_validator(mode="after")
    def _sizes(self) -> StagePlan:
        if self.gpus is not None and (
            len(self.gpus) != self.num_gpus or len(set(self.gpus)) != len(self.gpus)
        ):
            raise ValueError(
                f"gpus={list(self.gpus)} but tp*pp*dp = {self.num_gpus}; give that many distinct GPUs, or none"
            )
        if self.layers is not None and len(self.layers) != self.pp:
            raise ValueError(
                f"layers={list(self.layers)} but pp = {self.pp}; give one number for every stage"
            )
        return self


class PlanConfig(_Frozen):
    """The parallelism of every model-stage. Inference stages default to what the same model trains with."""

    actor_training: StagePlan = StagePlan()
    """Actor, training."""
    actor_generation: StagePlan | None = None
    """Actor, generation; as training when absent."""
    critic_training: StagePlan | None = None
    """Critic, training and inference; as the actor's training when absent."""
    reference_inference: StagePlan | None = None
    """Reference policy; as the actor's training when absent."""
    reward_inference: StagePlan | None = None
    """Reward model; as the actor's training when absent."""

    def stage(self, name: str) -> StagePlan:
        """The plan of a model-stage such as `actor.generation`, defaults resolved."""
        chosen = {
            "actor.training": self.actor_training,
            "actor.generation": self.actor_generation,
            "critic.training": self.critic_training,
            "critic.inference": self.critic_training,
            "reference.inference": self.reference_inference,
            "reward.inference": self.reward_inference,
        }[name]
        return chosen or self.actor_training


class ClusterConfig(_Frozen):
    """The Ray cluster and its GPUs."""

    address: str = "local"
    """`local` starts a private Ray on this machine; else the address of a running cluster, e.g.
    `host:6379`.
    """
    gpus: int = Field(default=1, ge=1)
    """Number of GPUs (workers) that the campaign uses."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` makes the GPUs logical: worker processes on cores, with gloo. `auto` takes cuda where there is
    one.
    """
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a peer inside a collective, seconds."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one worker."""


class Tracking(StrEnum):
    """How much of a step the Prefect server is told."""

    auto = "auto"
    full = "full"
    tasks = "tasks"
    step = "step"


class CheckpointConfig(_Frozen):
    """When the campaign's whole state is saved."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """Number of checkpoints kept."""


class CampaignConfig(_Frozen):
    """One post-training campaign."""

    name: str = Field(default="campaign", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the campaign; names the run folder."""
    output: str = "runs"
    """Folder under which the run folder `<output>/<name>` is made."""
    seed: int = Field(default=0, ge=0)
    """Seed of shuffling and sampling."""
    steps: int = Field(default=100, ge=1)
    """Number of steps."""
    models: ModelsConfig
    """The models."""
    prompts: PromptsConfig
    """The prompts."""
    reward: Annotated[PythonReward | ReasoningGymReward | ModelReward, Field(discriminator="kind")]
    """The reward."""
    algorithm: Annotated[GrpoConfig | PpoConfig | RemaxConfig, Field(discriminator="kind")] = GrpoConfig()
    """The algorithm."""
    batch: BatchConfig = BatchConfig()
    """Prompts and rows of a step."""
    sampling: SamplingConfig = SamplingConfig()
    """How the policy answers."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    plan: PlanConfig = PlanConfig()
    """The parallelism."""
    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: Tracking = Tracking.auto
    """`full`: a subflow a step and a task a stage; `tasks`: a task a stage; `step`: one task a step; `auto`
    takes the fullest whose overhead stays below 1 % of the measured step."""

    @property
    def run_folder(self) -> Path:
        """Where the run writes everything."""
        return Path(self.output).expanduser() / self.name

    @property
    def model_stages(self) -> tuple[str, ...]:
        """The model-stages that this campaign has."""
        stages = ["actor.generation", "actor.training"]
        if self.algorithm.kind == "ppo":
            stages.append("critic.training")
        if self.algorithm.kl is not None:
            stages.append("reference.inference")
        if self.reward.kind == "model":
            stages.append("reward.inference")
        return tuple(stages)

    @property
    def rows(self) -> int:
        """Rows a step learns from."""
        return self.batch.prompts * self.batch.samples

    @model_validator(mode="after")
    def _fits_the_cluster(self) -> CampaignConfig:
        for name in self.model_stages:
            plan = self.plan.stage(name)
            if outside := [gpu for gpu in plan.gpu_ids if not 0 <= gpu < self.cluster.gpus]:
                raise ValueError(
                    f"{name} ({plan.text}) uses GPUs {outside}, but the cluster has GPUs 0..{self.cluster.gpus - 1}; "
                    f"raise cluster.gpus to at least {max(outside) + 1} or make the plan smaller"
                )
        return self

    @model_validator(mode="after")
    def _batch(self) -> CampaignConfig:
        if self.batch.mini_batches > self.rows:
            raise ValueError(
                f"batch.mini_batches = {self.batch.mini_batches} but a step has {self.rows} rows "
                f"({self.batch.prompts} prompts x {self.batch.samples} samples); a mini-batch needs a row"
            )
        if self.algorithm.kind == "grpo" and self.batch.samples < 2:
            raise ValueError(
                "grpo compares the samples of a prompt, but batch.samples = 1 gives advantage zero everywhere; "
                "use at least 2 samples, or another algorithm"
            )
        if self.reward.kind == "reasoning_gym" and self.prompts.source.kind != "reasoning_gym":
            raise ValueError(
                f"reward.kind reasoning_gym scores its own problems, but prompts.source.kind is "
                f"{self.prompts.source.kind}; use prompts.source.kind reasoning_gym, or a python reward"
            )
        return self


def environment_folder() -> Path:
    """Where Nereus keeps what outlives a run (calibration priors): `$NEREUS_HOME`, else `~/.nereus`."""
    return Path(os.environ.get("NEREUS_HOME", "~/.nereus")).expanduser()
