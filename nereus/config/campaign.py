"""The whole tree: `CampaignConfig`, and the checks that need more than one part of it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from nereus.config.adaptation import AdaptationConfig, TransitionsConfig
from nereus.config.algorithm import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    PpoConfig,
    ReinforcePpConfig,
    RemaxConfig,
    RlooConfig,
)
from nereus.config.asynchrony import AsynchronyConfig
from nereus.config.dashboard import DashboardConfig
from nereus.config.engines import EnginesConfig
from nereus.config.evaluation import EvaluationConfig
from nereus.config.frozen import BY_KIND, Frozen
from nereus.config.logging import LoggerKind
from nereus.config.models import ModelsConfig
from nereus.config.paths import OutputPath
from nereus.config.plan import ClusterConfig, PlanChange, PlanConfig
from nereus.config.prompts import PromptsConfig
from nereus.config.reward import CodeReward, JudgeReward, ModelReward, PythonReward, ReasoningGymReward
from nereus.config.tools import ToolsConfig
from nereus.config.training import BatchConfig, OptimizerConfig, SamplingConfig


class Tracking(StrEnum):
    """How much of a step the Prefect server is told."""

    auto = "auto"
    full = "full"
    tasks = "tasks"
    step = "step"


class CheckpointConfig(Frozen):
    """When the campaign's whole state is saved."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """Number of checkpoints kept."""
    peer_copy_steps: int = Field(default=0, ge=0)
    """Steps between copies of the trained models in the memory of workers on two nodes; 0 keeps none. A node
    that takes a model's last replica then costs the steps since the last copy, not since the last checkpoint.
    """


class CampaignConfig(Frozen):
    """One post-training campaign."""

    name: str = Field(default="campaign", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the campaign; names the run folder."""
    output: OutputPath = "runs"
    """Folder under which the run folder `<output>/<name>` is made."""
    seed: int = Field(default=0, ge=0)
    """Seed of shuffling and sampling."""
    steps: int = Field(default=100, ge=1)
    """Number of steps."""
    models: ModelsConfig
    """The models."""
    prompts: PromptsConfig
    """The prompts."""
    reward: Annotated[PythonReward | ReasoningGymReward | CodeReward | JudgeReward | ModelReward, BY_KIND]
    """The reward."""
    algorithm: Annotated[
        GrpoConfig
        | PpoConfig
        | RemaxConfig
        | RlooConfig
        | ReinforcePpConfig
        | DapoConfig
        | DrGrpoConfig
        | GspoConfig
        | CispoConfig,
        BY_KIND,
    ] = GrpoConfig()
    """The algorithm."""
    batch: BatchConfig = BatchConfig()
    """Prompts and rows of a step."""
    asynchrony: AsynchronyConfig | None = None
    """Let generation run ahead of training, on GPUs of its own; without it they take turns. Give
    `algorithm.correction`, too, for samples that an older policy has drawn.
    """
    sampling: SamplingConfig = SamplingConfig()
    """How the policy answers."""
    tools: ToolsConfig | None = None
    """Tools that the policy may use while it answers, turn after turn; none when absent."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    engines: EnginesConfig = EnginesConfig()
    """The engines."""
    plan: PlanConfig = PlanConfig()
    """The parallelism, from the first step on."""
    changes: tuple[PlanChange, ...] = ()
    """Changes of it that are known beforehand; the job moves in place between two steps."""
    adaptation: AdaptationConfig | None = None
    """Choose the plan, plan anew when lengths, GPUs or speed drift, and move in place where that pays; then
    `plan` is not used and there are no `changes`. Without it the plan is fixed.
    """
    transitions: TransitionsConfig = TransitionsConfig()
    """Transitions that fail."""
    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    evaluation: EvaluationConfig | None = None
    """Measure the policy on prompts that it does not learn from; not done when absent."""
    loggers: tuple[LoggerKind, ...] = (LoggerKind.tensorboard,)
    """Where the run's numbers are shown besides: tensorboard, wandb (offline), mlflow (in the run folder)."""
    dashboard: DashboardConfig | None = None
    """A page on which the run shows itself while it runs, e.g. `dashboard: {}`; none when absent."""
    profile: bool = False
    """Write `trace.json` into the run folder: stages, calls and collectives of all workers, for Perfetto."""
    tracking: Tracking = Tracking.auto
    """`full`: a subflow a step and a task a stage; `tasks`: a task a stage; `step`: one task a step; `auto`
    takes the fullest whose overhead stays below 1 % of the measured step, one task for several steps where
    those are short."""

    @property
    def run_folder(self) -> Path:
        """Where the run writes everything."""
        return Path(self.output).expanduser().absolute() / self.name

    @property
    def model_stages(self) -> tuple[str, ...]:
        """The model-stages that this campaign has."""
        stages = ["actor.generation", "actor.training"]
        if self.algorithm.kind == "ppo":
            stages.append("critic.training")
        if self.algorithm.kl is not None and not self.scores_reference_frozen:
            stages.append("reference.inference")
        if self.reward.kind == "model":
            stages.append("reward.inference")
        return tuple(stages)

    def plan_at(self, step: int) -> PlanConfig:
        """The plan in force in a step."""
        plan = self.plan
        for change in self.changes:
            if change.before_step <= step:
                plan = change.plan
        return plan

    @property
    def scores_reference_frozen(self) -> bool:
        """Whether the actor without its adapters is the reference: then that needs no model of its own."""
        return self.models.lora is not None and self.models.reference is None

    @property
    def rescores(self) -> bool:
        """Whether the training engine computes the sampled tokens' log-probabilities once more."""
        return self.algorithm.correction is not None or self.engines.rescores

    @property
    def staleness(self) -> int:
        """Steps that generation may be ahead of training; 0 where they take turns."""
        return 0 if self.asynchrony is None else self.asynchrony.staleness

    @property
    def runs_ahead(self) -> bool:
        """Whether generation and training run at the same time."""
        return self.staleness > 0

    @property
    def rows(self) -> int:
        """Rows a step learns from."""
        return self.batch.prompts * self.batch.samples

    @model_validator(mode="after")
    def _fits_the_cluster(self) -> CampaignConfig:
        steps = [change.before_step for change in self.changes]
        if steps != sorted(set(steps)):
            raise ValueError(f"changes come before steps {steps}; give them in rising order, one a step")
        for whole in (self.plan, *(change.plan for change in self.changes)):
            self._check_gpus(whole)
        return self

    def _check_gpus(self, whole: PlanConfig) -> None:
        for name in self.model_stages:
            plan = whole.stage(name)
            if outside := [gpu for gpu in plan.gpu_ids if not 0 <= gpu < self.cluster.gpus]:
                raise ValueError(
                    f"{name} ({plan.text}) uses GPUs {outside}, but the cluster has GPUs "
                    f"0..{self.cluster.gpus - 1}; raise cluster.gpus to at least {max(outside) + 1} "
                    "or make the plan smaller"
                )

    @model_validator(mode="after")
    def _apart_where_ahead(self) -> CampaignConfig:
        if not self.runs_ahead:
            return self
        if self.adaptation is not None:
            return self._room_for_both()
        for whole in (self.plan, *(change.plan for change in self.changes)):
            generation = set(whole.stage("actor.generation").gpu_ids)
            for name in (name for name in self.model_stages if name.endswith(".training")):
                if shared := sorted(generation & set(whole.stage(name).gpu_ids)):
                    raise ValueError(
                        f"actor.generation and {name} both use GPUs {shared}, but they run at the same time "
                        f"with asynchrony.staleness = {self.staleness}; give plan.actor_generation"
                        " gpus of its own, or set staleness: 0"
                    )
        return self

    def _room_for_both(self) -> CampaignConfig:
        """The planner keeps generation and training apart, which takes a GPU for each."""
        cluster = self.cluster
        most = {
            "gpus": cluster.gpus,
            "max_gpus": cluster.max_gpus,
            **{f"schedule, before step {one.before_step}": one.max_gpus for one in cluster.schedule},
        }
        if short := [f"{name} = {num}" for name, num in most.items() if num is not None and num < 2]:
            raise ValueError(
                f"cluster.{short[0]}, but with asynchrony.staleness = {self.staleness} generation and "
                "training run at the same time on GPUs of their own; give at least 2, or set staleness: 0"
            )
        return self

    @model_validator(mode="after")
    def _engine_of_adapters(self) -> CampaignConfig:
        if self.models.lora is not None and self.engines.training != "torch":
            raise ValueError(
                f"models.lora is given, but engines.training = {self.engines.training} trains all weights; "
                "use engines.training: torch, or leave models.lora out"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_change(self) -> CampaignConfig:
        if self.adaptation is not None and self.changes:
            raise ValueError(
                "changes and adaptation are both given, but a job that adapts follows no changes known "
                "beforehand; leave one of them out"
            )
        if self.adaptation is None and self.cluster.max_gpus is not None:
            raise ValueError(
                "cluster.max_gpus is given, but without adaptation a job takes no further GPUs; "
                "add adaptation: {}, or leave max_gpus out"
            )
        if self.adaptation is None and self.cluster.schedule:
            raise ValueError(
                "cluster.schedule is given, but a job without adaptation keeps its GPUs; add adaptation: {}, "
                "or leave schedule out"
            )
        return self

    @model_validator(mode="after")
    def _batch(self) -> CampaignConfig:
        if self.batch.mini_batches > self.rows:
            raise ValueError(
                f"batch.mini_batches = {self.batch.mini_batches} but a step has {self.rows} rows "
                f"({self.batch.prompts} prompts x {self.batch.samples} samples); a mini-batch needs a row"
            )
        if self.algorithm.compares_samples and self.batch.samples < 2:
            raise ValueError(
                f"{self.algorithm.kind} compares the samples of a prompt, but batch.samples = 1 gives "
                "advantage zero everywhere; use at least 2 samples, or another algorithm"
            )
        sources = {"prompts.source": self.prompts.source}
        if self.evaluation is not None:
            sources["evaluation.source"] = self.evaluation.source
        for key, source in sources.items() if self.reward.kind == "reasoning_gym" else ():
            if source.kind != "reasoning_gym":
                raise ValueError(
                    f"reward.kind reasoning_gym scores its own problems, but {key}.kind is {source.kind}; "
                    f"use {key}.kind reasoning_gym, or a python reward"
                )
        return self
