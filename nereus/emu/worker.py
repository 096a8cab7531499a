"""One worker: the process of one GPU, holding the shards of every model-stage placed there.

    driver ── Ray calls, in one order for all ranks of a unit ──▶ worker ── engines ──▶ collectives with peers

It lives through transitions. Every method either works on this worker's shards or is collective over a named
set of workers; a unit's result travels back from its first rank only.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import ray
import torch
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.config.environment import reads_memory
from nereus.emu import tracing
from nereus.emu.adapter_weights import merged_state
from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.ballot import Vote
from nereus.emu.batch import PromptBatch, Rollouts, Sampling, Scores, TokenBatch, TrainBatch, TrainMetrics
from nereus.emu.checkpoint.part import Part, write_part
from nereus.emu.decision import Decision
from nereus.emu.device_memory import FreeMemory, free_memory, take_peak_bytes
from nereus.emu.engines.feeding import Fed, FeedEngine
from nereus.emu.engines.protocol import AdapterEngine, GenerateEngine, TrainEngine
from nereus.emu.engines.registry import REJOINING, load, open_generator, open_trainer
from nereus.emu.engines.rejoining import RejoiningEngine, agreed, made_alike
from nereus.emu.executor import Executor
from nereus.emu.filling import fill_engine
from nereus.emu.groups import Generation, backend_for
from nereus.emu.lanes import Lanes
from nereus.emu.layout import Layout, Rank, shard
from nereus.emu.loss import Loss
from nereus.emu.optimizer_slices import optimizer_stage
from nereus.emu.orders import Applied, Moved, Order, SpillOrder
from nereus.emu.rank_plan import RankPlan
from nereus.emu.stage import FromMemory, StageSpec
from nereus.emu.store import StoreAddress
from nereus.emu.timings import Observed, Timings
from nereus.emu.transaction import Participant
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.mesh import M2nResharder, MeshMover
from nereus.emu.transport.protocol import Deadline
from nereus.emu.unit_groups import UnitGroups
from nereus.emu.worker_process import own_device, prepare_process
from nereus.errors import InvalidOperation, explain


class Worker:
    """Holds engines by model-stage. Created by `Cluster` as a Ray actor, or directly in tests."""

    def __init__(self, rank: Rank, device: str, threads: int) -> None:
        prepare_process()
        torch.set_num_threads(threads)
        self.rank = rank
        self.device = own_device(device)
        self._generation: Generation | None = None
        self._engines: dict[str, TrainEngine] = {}
        self._generators: dict[str, GenerateEngine] = {}
        self._specs: dict[str, StageSpec] = {}
        self._participant: Participant | None = None
        self._timings = Timings(device=self.device)
        self._syncs: dict[str, RankPlan] = {}
        self._counts: dict[str, int] = {}

    def call(self, method: str, *arguments: object) -> tuple[object, float]:
        """Run a method by name; returns its result and the seconds it took here.

        A worker in which it raises leaves the world, so that peers that wait for it in a collective learn of
        it at once and not at the deadline; they then raise and leave, too.
        """
        started = time.perf_counter()
        try:
            result = tracing.run(getattr(self, method), method, arguments)
        except Exception as error:
            # The frames of the failure hold the groups, whose connections end only when nobody holds them.
            traceback.clear_frames(error.__traceback__)
            self._leave(broken=True)
            raise
        return result, time.perf_counter() - started

    def _leave(self, *, broken: bool = False) -> None:
        if self._generation is not None:
            generation, self._generation = self._generation, None
            if broken:
                self._counts |= {name: engine.step_count for name, engine in self._engines.items()}
                for stage in [*self._engines, *self._generators]:
                    self._forget(stage)
            self.participant.executor.transport.close(generation.number, broken=broken)
            generation.leave(broken=broken)
            if broken:
                gc.collect()

    def clock_ns(self) -> int:
        """This worker's clock, to be compared with the driver's."""
        return tracing.clock_ns()

    def begin_trace(self) -> None:
        """Record spans from here on."""
        tracing.start(self.device)

    def take_trace(self) -> list[tracing.Span]:
        """The spans since this was last asked."""
        return tracing.take()

    def ping(self) -> int:
        """This process's id; returns once the worker is ready."""
        return os.getpid()

    def attach(self, address: StoreAddress, timeout_s: float) -> str:
        """Connect; returns the id of the Ray node that this worker runs on."""
        self.connect(address, timeout_s)
        return str(ray.get_runtime_context().get_node_id())

    def connect(self, address: StoreAddress, timeout_s: float) -> None:
        """Connect to the driver's store: from then on state can be moved here."""
        transport = CollectiveTransport.connect(
            address, worker=self.rank, device=self.device, timeout_s=timeout_s, reads=reads_memory()
        )
        executor = Executor(transport, self.device)
        self._participant = Participant(worker=self.rank, executor=executor, allocate=self._allocate)

    def join(self, address: StoreAddress, number: int, workers: Sequence[Rank], timeout_s: float) -> None:
        """Enter a generation of the world; collective over `workers`."""
        self._leave()
        self._generation = Generation.join(
            address,
            number=number,
            worker=self.rank,
            workers=workers,
            backend=backend_for(self.device),
            device=self.device,
            timeout_s=timeout_s,
        )

    def load_engine(self, engine: str) -> None:
        """Import an engine that a transition may bring here."""
        load(engine)

    def build(self, spec: StageSpec) -> int:
        """Make and fill this worker's shard of a model-stage; returns the bytes of its state, 0 without one.

        An engine that is dear to make goes on where its unit is as it was. Collective over the generation,
        since groups are made here.
        """
        assert self._generation is not None, "a worker joins a generation before it builds"
        groups = self._generation.unit_groups(spec.units, model=spec.tensors)
        if groups is not None and self._rejoins(spec, groups):
            self._specs[spec.name] = spec
            return self._generators[spec.name].state.num_bytes
        self._forget(spec.name)
        if groups is None:
            self.participant.live.pop(spec.name, None)
            self.participant.live.pop(optimizer_stage(spec.name), None)
            return 0
        self._specs[spec.name] = spec
        if spec.role == "generation":
            return self._build_generator(spec, groups)
        engine = open_trainer(spec, groups, device=self.device, state=self._held(spec))
        fill_engine(engine, spec)
        self._engines[spec.name] = engine
        self._keep(spec, engine.state)
        return engine.state.num_bytes

    def _rejoins(self, spec: StageSpec, groups: UnitGroups) -> bool:
        """Let the engine of a model-stage go on, if every rank of the unit has one made for this unit.

        Collective over the unit where the engine is of that kind: a peer may have lost its own to a failure.
        """
        if spec.engine not in REJOINING:
            return False
        held, old = self._generators.get(spec.name), self._specs.get(spec.name)
        fits = old is not None and made_alike(old, spec, self.rank)
        engine: object = held if fits else None
        if not agreed(isinstance(engine, RejoiningEngine), groups, self.device):
            return False
        assert isinstance(engine, RejoiningEngine), "this rank said so"
        engine.rejoin(groups)
        return True

    def _keep(self, spec: StageSpec, state: ShardState) -> None:
        """Let transitions move the state: as one, or weights and optimizer apart."""
        live, omega_stage = self.participant.live, optimizer_stage(spec.name)
        if spec.apart:
            live[spec.name], live[omega_stage] = state.split()
        else:
            live[spec.name] = state
            live.pop(omega_stage, None)

    def _build_generator(self, spec: StageSpec, groups: UnitGroups) -> int:
        if spec.shares is not None:
            shared = self._engines[spec.shares].state
            self.participant.live.pop(spec.name, None)
            self._generators[spec.name] = open_generator(spec, groups, device=self.device, state=shared)
            return 0
        generator = open_generator(spec, groups, device=self.device, state=self._held(spec))
        self._generators[spec.name] = generator
        self.participant.live[spec.name] = generator.state
        return generator.state.num_bytes

    def _held(self, spec: StageSpec) -> ShardState | None:
        """The shard that a committed transition left here, None where the engine is filled otherwise.

        Raises InvalidOperation when it is not there: the engine would go on with zeros.
        """
        if not isinstance(spec.origin, FromMemory):
            return None
        held = self.participant.live.get(spec.name)
        if held is None:
            raise InvalidOperation(
                explain(
                    f"worker {self.rank} cannot build {spec.name}",
                    values="it holds no shard of it",
                    rule="a transition leaves a shard in every worker of its new units",
                )
            )
        omega = self.participant.live.get(optimizer_stage(spec.name))
        return held if omega is None else held.joined(omega)

    def _forget(self, stage: str) -> None:
        for engine in (self._engines.pop(stage, None), self._generators.pop(stage, None)):
            if engine is not None:
                engine.close()
        self._specs.pop(stage, None)

    def generate(self, stage: str, prompts: PromptBatch, sampling: Sampling, version: int) -> Rollouts | None:
        """Answer prompts; collective over the unit. Its first rank returns the rollouts."""
        with self._timings.of(f"{stage}/generate"):
            rollouts = self._generators[stage].generate(prompts, sampling, version)
        return rollouts if self._leads(stage) else None

    def feed(
        self, stage: str, prompts: PromptBatch, sampling: Sampling, version: int, begin: bool, more: bool
    ) -> Fed | None:
        """Answer prompts beside those that run; collective over the unit. Its first rank returns rows."""
        engine = self._generators[stage]
        assert isinstance(engine, FeedEngine), f"{stage} takes all of its rows at once"
        with self._timings.of(f"{stage}/generate"):
            fed = engine.feed(prompts, sampling, version, begin=begin, more=more)
        return fed if self._leads(stage) else None

    def score(
        self,
        stage: str,
        batch: TokenBatch,
        micro_batch_rows: int,
        temperature: float,
        micro_batch_tokens: int | None = None,
        frozen: bool = False,
    ) -> Scores | None:
        """Log-probabilities or values of the responses, if `frozen` without adapters; collective over the
        unit.
        """
        engine = self._engines[stage]
        score = engine.score
        if frozen:
            assert isinstance(engine, AdapterEngine), f"{stage} has no adapters"
            score = engine.score_frozen
        with self._timings.of(f"{stage}/{'score_frozen' if frozen else 'score'}"):
            scores = score(
                batch,
                micro_batch_rows=micro_batch_rows,
                micro_batch_tokens=micro_batch_tokens,
                temperature=temperature,
            )
        return scores if self._leads(stage) else None

    def rewards(
        self, stage: str, batch: TokenBatch, micro_batch_rows: int, micro_batch_tokens: int | None = None
    ) -> Tensor | None:
        """A reward model's judgement of each row; collective over the unit."""
        rewards_b = self._engines[stage].rewards(
            batch, micro_batch_rows=micro_batch_rows, micro_batch_tokens=micro_batch_tokens
        )
        return rewards_b if self._leads(stage) else None

    def train_step(
        self,
        stage: str,
        micro_batches: Sequence[TrainBatch],
        loss: Loss,
        counts: GlobalCounts,
        learning_rate: float,
        loss_scale: float = 1.0,
    ) -> TrainMetrics:
        """One optimizer step; collective over all units of the model-stage."""
        with self._timings.of(f"{stage}/train"):
            return self._engines[stage].train_step(
                micro_batches, loss, counts, learning_rate=learning_rate, loss_scale=loss_scale
            )

    def hold_sync_plan(self, source: str, plan: RankPlan) -> None:
        """Keep this worker's part of the plan by which theta moves from a training model-stage."""
        self._syncs[source] = plan

    def sync_weights(self, source: str, destination: str, deadline_s: float) -> int:
        """Move theta by the held plan; collective over its workers. Returns the bytes this worker sent.

        The channel stays open for as long as the generation lives, so a sync connects only once.
        """
        assert self._generation is not None, "a worker joins a generation before it moves weights"
        generator = self._generators.get(destination)
        old, new = self._served(source), None if generator is None else generator.state
        plan, epoch, deadline = self._syncs[source], self._generation.number, Deadline.after(deadline_s)
        if plan.meshes:
            sent_bytes = self._mover.run(plan, old, new, epoch=epoch, deadline=deadline)
        else:
            report = self.participant.executor.run(plan, old, new, epoch=epoch, deadline=deadline)
            sent_bytes = report.sent_bytes
        if generator is not None:
            generator.refresh()
        return sent_bytes

    @cached_property
    def _mover(self) -> MeshMover:
        """What moves weights between meshes. Raises InvalidOperation where this machine cannot."""
        transport = self.participant.executor.transport
        assert isinstance(transport, CollectiveTransport), "a worker's transport is between processes"
        return MeshMover(transport.ordered, M2nResharder.load(self.device), Lanes.of(self.device))

    def _served(self, source: str) -> ShardState | None:
        """The weights that generation is to have, None where none are held: adapters are added to a copy."""
        engine = self._engines.get(source)
        if engine is None:
            return None
        lora = self._specs[source].model.lora
        return engine.state if lora is None else merged_state(engine.state, lora)

    def begin_transition(self, epoch: int) -> None:
        """Open an epoch; operations follow."""
        self.participant.begin(epoch)

    def prepare_operation(self, order: Order, deadline_s: float) -> Moved:
        """Build an operation's new shard beside the old one; collective over the workers of its plan."""
        return self.participant.prepare(order, deadline_s=deadline_s)

    def spill_shard(self, order: SpillOrder, deadline_s: float) -> Moved:
        """Put a shard into host memory until the decision. Its engine rests until then."""
        return self.participant.spill(order, deadline_s=deadline_s)

    def vote(self) -> Vote:
        """Whether all operations of the open epoch are done."""
        return self.participant.vote()

    def apply_decision(self, decision: Decision) -> Applied:
        """Let the new shards count, or drop them. Engines still hold the old ones until they are built
        anew.
        """
        return self.participant.apply(decision)

    def held_states(self) -> tuple[str, ...]:
        """The model-stages of which this worker holds a shard that transitions may move."""
        return tuple(self.participant.live)

    def free_memory(self) -> FreeMemory:
        """What could still be taken here; of a host for all of its workers together."""
        return free_memory(self.device)

    def drop(self, key: str) -> None:
        """Free a shard that no engine uses: one of a copy that a newer one has replaced."""
        self.participant.live.pop(key, None)

    def _allocate(self, order: Order) -> ShardState:
        unit = order.plan.new
        assert unit is not None, "a worker allocates for a unit that it will be in"
        kinds: dict[str, torch.dtype] = {kind.name: TORCH_DTYPE[kind.dtype] for kind in unit.kinds}
        held = shard(order.model, unit.layout, self.rank)
        return ShardState.empty(held, kinds, self.device, allocated=order.plan.mode == "shadow")

    @property
    def participant(self) -> Participant:
        """This worker's side of transitions."""
        assert self._participant is not None, "a worker is attached before anything is moved"
        return self._participant

    def write_checkpoint(self, stage: str, model: str, folder: Path) -> tuple[Part, int]:
        """Write the boxes that this rank owns of a model-stage; returns the part and Adam's step count."""
        engine, spec = self._engines[stage], self._specs[stage]
        omega = spec.optimizer_units[0].layout if spec.zero1 else None
        part = write_part(folder, model, spec.trained, spec.units[0], self.rank, engine.state, omega)
        return part, engine.step_count

    def step_count(self, stage: str) -> int:
        """Optimizer steps that a model-stage has taken."""
        engine = self._engines.get(stage)
        return self._counts[stage] if engine is None else engine.step_count

    def observe(self) -> Observed:
        """Peak memory, and seconds by call and term, since this was last asked."""
        return Observed(peak_bytes=take_peak_bytes(self.device), terms=self._timings.take())

    def _layout(self, stage: str) -> Layout:
        """The layout of the unit of `stage` that this worker is in."""
        return next(unit for unit in self._specs[stage].units if self.rank in unit.ranks)

    def _leads(self, stage: str) -> bool:
        """Whether this worker is the first of its unit."""
        return self._layout(stage).ranks[0] == self.rank
