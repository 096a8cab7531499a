"""Every candidate of every model-stage on a cluster, priced: from a request to the arrays of a `Problem`.

A candidate is a layout (tp, pp, ep, cp), a number of units dp, a GPU kind and the stage's own options
(micro-batch and recompute, or how many sequences generation holds at once). Those that do not fit a GPU by
themselves are left out before they are priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nereus.planner.cost import StageCost, StageCosts, publish_times, stage_times
from nereus.planner.fixed import Choice, Cut, chosen, chosen_number
from nereus.planner.layouts import check_fixed, layouts
from nereus.planner.memory import StageMemories, StageMemory, stage_memories, usable_bytes
from nereus.planner.problem import Floats, Ints, PoolLimit, Problem, Seat, Timing
from nereus.planner.request import Arrangement, Option, Placement, PlanRequest
from nereus.planner.workload import ModelStage, Recompute, Stage, Workload

STAGES = tuple(Stage)
PAIRS = (
    (ModelStage.ACTOR_GENERATION, ModelStage.ACTOR_TRAINING),
    (ModelStage.CRITIC_INFERENCE, ModelStage.CRITIC_TRAINING),
)


Block = tuple[StageCosts, StageMemories]
"""What was priced in one call, term by term."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateSet:
    """A model-stage's candidates: the seat's arrays and what each row means.

    `option[i]` indexes `options`, `seat.pool[i]` the cluster's pools, (`block[i]`, `cost_row[i]`,
    `memory_row[i]`) the terms of its time and memory in `blocks`. `cuts` are all (tp, pp, ep, cp) looked at,
    also those of which nothing fits a GPU by itself.
    """

    model_stage: ModelStage
    seat: Seat
    tp: Ints
    pp: Ints
    dp: Ints
    ep: Ints
    cp: Ints
    option: Ints
    block: Ints
    cost_row: Ints
    memory_row: Ints
    blocks: tuple[Block, ...]
    options: tuple[Option, ...]
    cuts: tuple[Cut, ...]

    def cost_of(self, row: int) -> StageCost:
        """The time of one candidate, by term."""
        cost, _ = self.blocks[int(self.block[row])]
        return cost.at(int(self.cost_row[row]))

    def memory_of(self, row: int) -> StageMemory:
        """The memory of one candidate, by term."""
        _, memory = self.blocks[int(self.block[row])]
        return memory.at(int(self.memory_row[row]))

    def has_cut(self, cut: Cut) -> NDArray[np.bool_]:
        """Which candidates are cut so."""
        tp, pp, ep, cp = cut
        return np.asarray((self.tp == tp) & (self.pp == pp) & (self.ep == ep) & (self.cp == cp))

    def take(self, rows: Ints) -> CandidateSet:
        """The set with only these candidates."""
        return replace(
            self,
            seat=self.seat.take(rows),
            tp=self.tp[rows],
            pp=self.pp[rows],
            dp=self.dp[rows],
            ep=self.ep[rows],
            cp=self.cp[rows],
            option=self.option[rows],
            block=self.block[rows],
            cost_row=self.cost_row[rows],
            memory_row=self.memory_row[rows],
        )


def candidate_sets(request: PlanRequest) -> tuple[CandidateSet, ...]:
    """The candidates of every model-stage of the workload, in stage order.

    Raises ConfigError when a fixed choice is impossible for its model or the cluster.
    """
    return tuple(_candidates(request, model_stage) for model_stage in request.workload.model_stages)


def problem_of(
    request: PlanRequest, sets: Sequence[CandidateSet], arrangement: Arrangement | None = None
) -> Problem:
    """The selection problem over these candidates, by default in the request's first arrangement."""
    arrangement = arrangement or request.arrangements[0]
    index = {item.model_stage: at for at, item in enumerate(sets)}
    timing: Timing = "overlap" if request.workload.schedule.overlaps else "sync"
    return Problem(
        seats=tuple(item.seat for item in sets),
        pools=tuple(
            PoolLimit(
                num_gpus=pool.num_gpus,
                limit_bytes=float(usable_bytes(request.cluster, pool.gpu.name)),
            )
            for pool in request.cluster.pools
        ),
        pairs=tuple((index[serve], index[train]) for serve, train in PAIRS if serve in index),
        timing=timing,
        own_generation_pool=arrangement.placement is Placement.DISAGGREGATED,
        must_share=frozenset(
            (index[serve], index[train])
            for serve, train in PAIRS
            if serve in index and serve.model in request.share
        ),
        in_turn=frozenset(STAGES.index(stage) for stage in arrangement.in_turn),
    )


def _candidates(request: PlanRequest, model_stage: ModelStage) -> CandidateSet:
    options = tuple(stage_options(request, model_stage))
    kind = chosen(request.fixed, model_stage, Choice.GPU)
    if kind is not None:
        kind = request.cluster.pool(str(kind)).gpu.name  # a stranger is an error
    pools = [pool for pool in request.cluster.pools if kind in (None, pool.gpu.name)]
    check_fixed(model_stage, request.workload, pools, request.fixed)
    blocks: list[Block] = []
    parts = [
        _on_pool(request, model_stage, number, options, blocks)
        for number, name in enumerate(request.cluster.gpu_kinds)
        if kind in (None, name)
    ]
    columns = [np.concatenate(column) for column in zip(*(part[0] for part in parts), strict=True)]
    tp, pp, dp, ep, cp, pool, option, *origin = (column.astype(np.int64) for column in columns[:10])
    persistent, transient, latency, sync = columns[10:]
    layout = _layout_key(pool, (tp, 8), (pp, 9), (ep, 9), (cp, 8), (dp, 21))
    if model_stage is ModelStage.ACTOR_GENERATION and not request.workload.shares_weights:
        layout = ~layout  # equal to no layout of training
    seat = Seat(
        name=str(model_stage),
        stage=STAGES.index(model_stage.stage),
        pool=pool,
        gpus=tp * pp * ep * cp * dp,
        persistent_bytes=persistent,
        transient_bytes=transient,
        latency_s=latency,
        sync_s=sync,
        layout=layout,
    )
    return CandidateSet(
        model_stage=model_stage,
        seat=seat,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        cp=cp,
        option=option,
        block=origin[0],
        cost_row=origin[1],
        memory_row=origin[2],
        blocks=tuple(blocks),
        options=options,
        cuts=tuple(sorted({cut for part in parts for cut in part[1]})),
    )


def _layout_key(pool: Ints, *sizes: tuple[Ints, int]) -> Ints:
    """One number for a pool and sizes of so many bits each; equal where all of them are."""
    key = pool
    for values, bits in sizes:
        assert (values < 1 << bits).all(), f"a size takes more than {bits} bits"
        key = key << bits | values
    return key


def _on_pool(
    request: PlanRequest,
    model_stage: ModelStage,
    number: int,
    options: Sequence[Option],
    blocks: list[Block],
) -> tuple[list[Floats], set[Cut]]:
    """Columns (tp, pp, dp, ep, cp, pool, option, block and rows in it, persistent, transient, latency, sync)
    of one pool, and all (tp, pp, ep, cp). Appends what it prices to `blocks`.
    """
    cluster, pool = request.cluster, request.cluster.pools[number]
    kind, limit = pool.gpu.name, usable_bytes(request.cluster, pool.gpu.name)
    sizes = layouts(model_stage, request.workload, pool, request.space, request.fixed)
    rows: list[list[Floats]] = [[np.zeros(0)] * 14]
    for at, option in enumerate(options):
        workload = option.apply(request.workload)
        memory = stage_memories(model_stage, *sizes, workload=workload, cluster=cluster, gpu_kind=kind)
        fits = memory.persistent_bytes + memory.transient_bytes <= limit
        fits &= _share(model_stage, request.workload, sizes[2]) > _next_smaller(option, options)
        fitting = [size[fits] for size in sizes]
        count = len(fitting[0])
        if not count:
            continue
        cost = stage_times(
            model_stage,
            *fitting,
            workload=workload,
            cluster=cluster,
            gpu_kind=kind,
            calibration=request.calibration,
        )
        sync = np.zeros(count)
        if any(model_stage is serve for serve, _ in PAIRS):
            sync = publish_times(
                model_stage,
                fitting[0],
                fitting[1],
                fitting[3],
                workload=workload,
                cluster=cluster,
                gpu_kind=kind,
                calibration=request.calibration,
            )
        same = [np.full(count, float(value)) for value in (number, at, len(blocks))]
        found = [np.arange(count, dtype=np.float64), np.flatnonzero(fits).astype(np.float64)]
        kept = [memory.persistent_bytes[fits], memory.transient_bytes[fits]]
        rows.append([*fitting, *same, *found, *kept, cost.latency_s, sync])
        blocks.append((cost, memory))
    columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
    cuts = np.unique(np.stack([sizes[at] for at in (0, 1, 3, 4)]).astype(np.int64), axis=1)
    return columns, set(zip(*cuts.tolist(), strict=True))


def stage_options(request: PlanRequest, model_stage: ModelStage) -> list[Option]:
    """The combinations of a model-stage's own options, fixed ones taken as they are."""
    known = request.options

    def numbers(choice: Choice, given: tuple[int | None, ...]) -> tuple[int | None, ...]:
        value = chosen_number(request.fixed, model_stage, choice)
        return given if value is None else (value,)

    if model_stage.stage is Stage.GENERATION:
        return [Option(max_resident=size) for size in numbers(Choice.MAX_RESIDENT, known.max_residents)]
    if model_stage.stage is Stage.INFERENCE:
        return [Option(micro_batch=size) for size in numbers(Choice.MICRO_BATCH, known.score_micro_batches)]
    recompute = chosen(request.fixed, model_stage, Choice.RECOMPUTE)
    recomputes = known.recomputes if recompute is None else (Recompute(str(recompute)),)
    experts = request.workload.shape(model_stage).experts
    given = known.train_micro_batches if experts is None else known.dealt_micro_batches
    sizes = numbers(Choice.MICRO_BATCH, given)
    return [Option(micro_batch=size, recompute=way) for way in recomputes for size in sizes]


def _share(model_stage: ModelStage, workload: Workload, dp: Floats) -> Floats:
    """Sequences of one unit that the option cuts."""
    if model_stage.stage is Stage.GENERATION:
        return np.ceil(workload.num_generated / dp)
    cuts = workload.num_mini_batches if model_stage.stage is Stage.TRAINING else 1
    return np.ceil(workload.num_sequences / cuts / dp)


def effective(option: Option, model_stage: ModelStage, workload: Workload, dp: int) -> Option:
    """The option as it acts on the share of one unit: no micro-batch and no residency beyond it."""
    share = int(_share(model_stage, workload, np.array([float(dp)]))[0])
    if option.micro_batch is not None:
        return replace(option, micro_batch=min(option.micro_batch, share))
    held = option.max_resident
    return replace(option, max_resident=None if held is None or held >= share else held)


def _next_smaller(option: Option, options: Sequence[Option]) -> float:
    """The largest smaller size among the options: up to that share both are the same candidate."""
    mine = _size(option)
    return max((_size(other) for other in options if _size(other) < mine), default=0.0)


def _size(option: Option) -> float:
    size = option.micro_batch or option.max_resident
    return np.inf if size is None else float(size)
