"""A running campaign's live parts in one place: cluster, model-stages, reward processes, record, logical
state.

`open_job` starts them and ends them whatever happens. The tasks act on a `Job`; what they pass to one another
are values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from nereus.algorithms.loss_scale import LossScale
from nereus.config import CampaignConfig
from nereus.config.environment import uses_m2n
from nereus.data.order import Cursor
from nereus.emu.checkpoint.control import Control
from nereus.emu.checkpoint.folder import step_folder
from nereus.emu.checkpoint.source import Checkpoint
from nereus.emu.cluster import Call, Cluster
from nereus.emu.layout import Rank
from nereus.emu.rank_plan import RankPlan
from nereus.emu.stage import FromCheckpoint, FromMemory, StageSpec
from nereus.planner.backoff import BackOff
from nereus.planner.processes import CallsSeen
from nereus.record.listener import Listener, current_listener
from nereus.record.metrics import MetricsLog
from nereus.record.step import StepRecord
from nereus.rewards.configured import configured_reward, configured_tools
from nereus.rewards.function import RewardFunction
from nereus.rewards.tools import Tools
from nereus.tasks.adapt import Adapter, seated_stages, start_adapter
from nereus.tasks.device import device
from nereus.tasks.length_history import LengthHistory
from nereus.tasks.peer_places import Copies
from nereus.tasks.prepare import Prepared
from nereus.tasks.resume import checkpoints_folder, find_checkpoint, with_origin
from nereus.tasks.share import Share
from nereus.tasks.stages import GENERATION, TRAINING
from nereus.tasks.topology import limits_on, topology_of
from nereus.tasks.weight_sync import plan_weight_sync

GENERATE = "generate"  # the kind of work, and the stage, that draws responses
KL_BETA = "kl_beta"  # the name under which a control record holds it
LOSS_SCALE = "loss_scale/"  # the same, a model-stage's name follows
SYNC_DEADLINE_S = 300.0  # far above any sync; a dead peer is noticed by its connection, much earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignState:
    """The logical state: steps completed, version of the policy, position in the data, the weight of a KL
    term that adapts, and loss scales. No layout is in it.
    """

    step: int = 0
    policy_version: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    kl_beta: float | None = None
    """None where it does not adapt, and before the first step."""
    loss_scales: Mapping[str, LossScale] = field(default_factory=dict)
    """By model-stage, of those that train in fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Response lengths of a step's rows, seconds of the busiest worker by kind of work, peak device memory.

    A step that moved on the way has no seconds: they would be those of two plans. CPUs have no device memory.
    """

    lengths_b: Tensor
    work_s: Mapping[str, float]
    memory_bytes: Mapping[Rank, int]
    terms_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by call (`actor.training/train`) and term, as far as engines told."""


@dataclass(kw_only=True)
class Job:
    """The live parts of one campaign. Only the campaign's driver changes it, between stages."""

    prepared: Prepared
    cluster: Cluster
    stages: Mapping[str, StageSpec]
    weight_sync: Mapping[Rank, RankPlan] | None
    reward: RewardFunction | None
    log: MetricsLog
    listener: Listener
    state: CampaignState
    planned: Mapping[str, StageSpec]
    """The model-stages as the plan in force names them; `stages` has the ranks that were chosen."""
    adapter: Adapter | None
    """The controller of a job that adapts."""
    adam_steps: dict[str, int]
    """Optimizer steps that each trained model-stage had taken when the last stage completed."""
    tools: Tools | None = None
    """The processes of the policy's tools."""
    calls_seen: dict[str, CallsSeen] = field(default_factory=dict)
    """What calls of rewards and tools took in the steps so far, the newest ones first in weight."""
    is_built: bool = True
    """Whether the engines are those of `stages`; not so from a transition's commit until they are built."""
    checkpoint: Path | None = None
    stage_s: dict[str, float] = field(default_factory=dict)
    done: dict[str, object] = field(default_factory=dict)
    """Results of the stages that this step has completed: a step that is tried again does not repeat them."""
    tried: int = -1
    """The step that was tried last."""
    again: bool = False
    """Whether this is another try of it, or it moved on the way: then it ran under two plans."""
    began_s: float = 0.0
    """When its first try began, on the clock of `time.perf_counter`."""
    measured: Measured | None = None
    """What the last step showed; None before the first one and after a recovery."""
    target: Mapping[str, StageSpec] | None = None
    """The model-stages to move to, of the transition that was asked for last."""
    back_off: BackOff | None = None
    """The plan to which the last transition was aborted, and until when it is not tried again."""
    share: Share | None = None
    """The job's part in a pool that a broker shares out."""
    decided: int | None = None
    """The step before which the planner decided last."""
    copies: Copies | None = None
    """The newest copies of the trained models in the memory of peers."""
    lengths: LengthHistory = field(default_factory=LengthHistory)
    """How long responses to each prompt were in this run."""
    at_boundary: Callable[[], int] | None = None
    """Lets other weights and units come in between two segments of responses; returns the version of the
    policy in generation from there on. None where responses are drawn whole."""

    @property
    def config(self) -> CampaignConfig:
        """The campaign's configuration."""
        return self.prepared.config

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return checkpoints_folder(self.config)

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint holds the current state."""
        return self.checkpoint == step_folder(self.checkpoints, self.state.step)

    def begin_step(self) -> None:
        """Forget the last step's durations and results, unless this is another try of the same step."""
        self.again = self.tried == self.state.step
        if self.again:
            return
        self.tried = self.state.step
        self.began_s = time.perf_counter()
        self.stage_s.clear()
        self.done.clear()
        self.take_busy_s()

    def take_busy_s(self) -> dict[str, float]:
        """Seconds of the busiest worker by kind of work, since this was last asked.

        Those of drawing responses ahead of training are of other steps: they are left to who draws them.
        """
        ahead = () if self.config.asynchrony is None else (GENERATE,)
        return self.cluster.take_busy_s(lambda what: what not in ahead)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and tell the listener when it begins and ends."""
        self.listener.on_stage(self.state.step, name, None)
        started = time.perf_counter()
        yield
        took_s = time.perf_counter() - started
        self.stage_s[name] = self.stage_s.get(name, 0.0) + took_s  # DAPO may generate several times
        self.listener.on_stage(self.state.step, name, took_s)

    def finish_step(self, record: StepRecord) -> None:
        """Append the record to the log and tell the listener."""
        self.log.append(record)
        self.listener.on_step(record)


@contextmanager
def open_job(prepared: Prepared, *, resume: bool) -> Iterator[Job]:
    """Start cluster, model-stages and reward processes, from the start or from the newest checkpoint.

    Raises CheckpointError when `resume` finds no checkpoint or one of another campaign, or when a fresh run
    would write into the folder of an earlier one.
    """
    config = prepared.config
    checkpoint = find_checkpoint(prepared, resume=resume)
    state = restored_state(checkpoint)
    planned = prepared.stages_at(state.step)
    stages = {name: with_origin(spec, checkpoint) for name, spec in planned.items()}
    stop, halted = threading.Event(), threading.Event()
    listener = current_listener.get()
    with ExitStack() as stack:
        log = stack.enter_context(_log(config, state.step))
        reward = stack.enter_context(_reward(prepared, halted))
        tools = stack.enter_context(_tools(prepared, halted))
        listener.on_message(f"starting {config.cluster.gpus} workers")
        cluster = Cluster.start(
            address=config.cluster.address,
            num_workers=config.cluster.gpus,
            max_workers=config.cluster.max_gpus or config.cluster.gpus,
            device=device(config),
            threads=config.cluster.threads,
            timeout_s=config.cluster.timeout_s,
            stop=stop,
            halted=halted,
        )
        stack.callback(cluster.close)
        adapter = None
        if config.adaptation is not None:
            models, pool = prepared.models, cluster.pool()
            longest = prepared.prompts.longest
            adapter = start_adapter(
                config, config.adaptation, models, pool, step=state.step, prompt_tokens=longest
            )
            planned = seated_stages(planned, adapter.seated)
            stages = {name: with_origin(spec, checkpoint) for name, spec in planned.items()}
        cluster.join()
        sync = build_stages(cluster, stages, device=device(config))
        load_engines(cluster, config)
        yield Job(
            prepared=prepared,
            cluster=cluster,
            stages=stages,
            planned=planned,
            adapter=adapter,
            weight_sync=sync,
            reward=reward,
            tools=tools,
            log=log,
            listener=listener,
            state=state,
            adam_steps=counted_steps(stages),
            checkpoint=None if checkpoint is None else checkpoint.path,
            lengths=restored_lengths(checkpoint),
        )


def restored_state(checkpoint: Checkpoint | None) -> CampaignState:
    """The logical state that a checkpoint holds; the first one without a checkpoint."""
    if checkpoint is None:
        return CampaignState()
    return state_of(checkpoint.control)


def restored_lengths(checkpoint: Checkpoint | None) -> LengthHistory:
    """What a checkpoint knows of response lengths; nothing without a checkpoint."""
    return LengthHistory.of({} if checkpoint is None else checkpoint.control.prompt_lengths)


def state_of(control: Control) -> CampaignState:
    """The logical state that a control record holds."""
    cursor = Cursor(epoch=control.epoch, position=control.position)
    return CampaignState(
        step=control.step,
        policy_version=control.policy_version,
        cursor=cursor,
        kl_beta=control.scalars.get(KL_BETA),
        loss_scales={
            name.removeprefix(LOSS_SCALE): LossScale(value, control.counters[name])
            for name, value in control.scalars.items()
            if name.startswith(LOSS_SCALE)
        },
    )


def counted_steps(stages: Mapping[str, StageSpec]) -> dict[str, int]:
    """Optimizer steps that each trained model-stage has taken where it is filled from."""
    return {
        spec.name: spec.origin.step_count if isinstance(spec.origin, FromCheckpoint) else 0
        for spec in stages.values()
        if spec.role == "training"
    }


def load_engines(cluster: Cluster, config: CampaignConfig) -> None:
    """Where plans change, import the engine of generation on workers that have no unit of it yet, so that no
    transition waits for that.
    """
    if config.changes or config.adaptation is not None:
        call = Call("load_engine", (config.engines.generation,))
        cluster.run(dict.fromkeys(cluster.ranks, call), what=f"load {config.engines.generation}")


def build_stages(
    cluster: Cluster, stages: Mapping[str, StageSpec], *, device: str
) -> dict[Rank, RankPlan] | None:
    """Build every model-stage on its workers, hand out the weight-sync plan, and sync once.

    Generation that a transition has moved needs no sync: it holds the weights of the last one. Returns the
    plan by rank, or None where generation shares the training units' weights.
    """
    for spec in stages.values():
        cluster.run(dict.fromkeys(cluster.ranks, Call("build", (spec,))), what=f"build {spec.name}")
    training, generation = stages[TRAINING], stages[GENERATION]
    if generation.shares is not None:
        return None
    topology = topology_of(cluster.pool(), stages, device=device)
    meshes = device == "cuda" and uses_m2n()
    plans = plan_weight_sync(training, generation, topology, limits_on(device), by_meshes=meshes)
    held = {rank: Call("hold_sync_plan", (training.name, plan)) for rank, plan in plans.items()}
    cluster.run(held, what="hold the weight sync's plan")
    if not isinstance(generation.origin, FromMemory):
        cluster.run(sync_calls(plans), what="publish")
    return plans


def sync_calls(ranks: Iterable[Rank]) -> dict[Rank, Call]:
    """One weight sync on all workers of its plan."""
    call = Call("sync_weights", (TRAINING, GENERATION, SYNC_DEADLINE_S))
    return dict.fromkeys(ranks, call)


def _log(config: CampaignConfig, first_step: int) -> MetricsLog:
    return MetricsLog(
        config.run_folder,
        first_step=first_step,
        loggers=config.loggers,
        name=config.name,
        config=config.model_dump(mode="json"),
    )


def _reward(prepared: Prepared, halted: threading.Event) -> AbstractContextManager[RewardFunction | None]:
    """The reward's processes, or nothing where a reward model scores; `halted` ends calls under way."""
    reward = prepared.config.reward
    return nullcontext() if reward.kind == "model" else configured_reward(reward, stop=halted)


def _tools(prepared: Prepared, halted: threading.Event) -> AbstractContextManager[Tools | None]:
    """The processes of the policy's tools, where it has any; `halted` ends calls under way."""
    tools = prepared.config.tools
    return nullcontext() if tools is None else configured_tools(tools, stop=halted)
