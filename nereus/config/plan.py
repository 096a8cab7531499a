"""The parallelism of every model-stage, and the cluster it runs on."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from nereus.config.frozen import Frozen


class StagePlan(Frozen):
    """Layout, number of units and GPUs of one model-stage."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    dp: int = Field(default=1, ge=1)
    """Number of units (data-parallel replicas)."""
    ep: int = Field(default=1, ge=1)
    """Ranks of a unit that divide the experts of a mixture, and in training and scoring a micro-batch's rows.
    """
    cp: int = Field(default=1, ge=1)
    """Ranks of a unit that divide the tokens of every sequence (ring attention); not in generation."""
    gpus: tuple[int, ...] | None = None
    """The GPUs, unit after unit in layout order; by default the first tp*pp*ep*cp*dp of the cluster."""
    layers: tuple[int, ...] | None = None
    """Layers of every pipeline stage; by default as even as possible."""

    @property
    def num_gpus(self) -> int:
        """GPUs that the model-stage occupies."""
        return self.tp * self.pp * self.ep * self.cp * self.dp

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """The GPUs, unit after unit in layout order."""
        return tuple(range(self.num_gpus)) if self.gpus is None else self.gpus

    @property
    def text(self) -> str:
        """E.g. `tp2 pp1 dp2`; ep and cp where they are above 1."""
        more = "".join(f" {axis}{size}" for axis, size in (("ep", self.ep), ("cp", self.cp)) if size > 1)
        return f"tp{self.tp} pp{self.pp}{more} dp{self.dp}"

    @model_validator(mode="after")
    def _sizes(self) -> StagePlan:
        if self.gpus is not None and (
            len(self.gpus) != self.num_gpus or len(set(self.gpus)) != len(self.gpus)
        ):
            raise ValueError(
                f"gpus={list(self.gpus)} but tp*pp*ep*cp*dp = {self.num_gpus}; "
                "give that many distinct GPUs, or leave gpus out"
            )
        if self.layers is not None and len(self.layers) != self.pp:
            raise ValueError(
                f"layers={list(self.layers)} but pp = {self.pp}; give one number for every stage"
            )
        return self


class PlanConfig(Frozen):
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


class PlanChange(Frozen):
    """A change of the parallelism that is known beforehand: a reservation that ends, GPUs that arrive."""

    before_step: int = Field(ge=1)
    """The step before which the job moves to the new plan."""
    plan: PlanConfig
    """The plan from then on."""


class PoolChange(Frozen):
    """A change of the GPUs that is known beforehand: some are promised to others, or come back."""

    before_step: int = Field(ge=1)
    """The step before which it happens."""
    max_gpus: int = Field(ge=1)
    """GPUs that the campaign may hold from then on, never more than `cluster.max_gpus`."""


class BrokerConfig(Frozen):
    """How a campaign takes part in the sharing of a pool."""

    unit: int = Field(default=1, ge=1)
    """GPUs that come and go together, e.g. a node's."""
    weight: float = Field(default=1.0, gt=0)
    """What a share of this campaign's time is worth, beside that of others."""


class ClusterConfig(Frozen):
    """The Ray cluster and its GPUs."""

    address: str = "local"
    """`local` starts a private Ray on this machine; else the address of a running cluster, e.g.
    `host:6379`.
    """
    gpus: int = Field(default=1, ge=1)
    """Number of GPUs (workers) that the campaign uses."""
    max_gpus: int | None = Field(default=None, ge=1)
    """With `adaptation`, up to how many GPUs the campaign takes when they are free; `gpus` when absent."""
    schedule: tuple[PoolChange, ...] = ()
    """With `adaptation`, how many GPUs the campaign may hold from which step on: what it has beyond it gives
    back, and when more are allowed again it takes those that are free.
    """
    gpu_kind: str | None = None
    """Kind of the GPUs for the planner, e.g. `H100`; what the device says when absent, `CPU` on a CPU."""
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """With `adaptation`, memory of one GPU that plans may count on, in GB (10^9 bytes), where others use the
    rest; all that the kind has when absent. On CPUs also what a worker may hold of model state in a
    transition; all that its host has free when absent.
    """
    gpu_limit: str = "nereus-gpus"
    """Name of the Prefect server's global concurrency limit that counts the GPUs which campaigns share
    (made by `nereus deploy`). A campaign waits there for its GPUs; a server without this limit makes none
    wait.
    """
    broker: BrokerConfig | None = None
    """Share the GPUs of `gpu_limit` with other campaigns: `gpus` are always held, more up to `max_gpus` come
    and go as the pool's broker (the flow `broker`) grants them. Needs `adaptation`. Without it, the campaign
    holds `max_gpus` of the limit all along.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` makes the GPUs logical: worker processes on cores, with gloo. `auto` takes cuda where there is
    one.
    """
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a peer inside a collective, seconds."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one worker."""

    @model_validator(mode="after")
    def _limit(self) -> ClusterConfig:
        if self.max_gpus is not None and self.max_gpus < self.gpus:
            raise ValueError(
                f"max_gpus = {self.max_gpus} but gpus = {self.gpus}; a campaign starts with `gpus` and takes "
                "more up to `max_gpus`, so give at least that many, or leave max_gpus out"
            )
        steps = [change.before_step for change in self.schedule]
        if any(later <= sooner for sooner, later in pairwise(steps)):
            raise ValueError(f"schedule changes the GPUs before steps {steps}; give them in rising order")
        return self

    def most_at(self, step: int) -> int:
        """GPUs that the campaign may hold before a step."""
        most = self.max_gpus or self.gpus
        begun = [change.max_gpus for change in self.schedule if change.before_step <= step]
        return min(most, begun[-1]) if begun else most
