"""The plan-selection problem as arrays: what is chosen, what limits it, what a choice costs.

```
  stage 0 generation     stage 1 inference                   stage 2 training
  actor.generation ────▶ critic | reference | reward ──────▶ actor | critic
        └───────────── coupled: one layout, weights counted once ──────┘
```
A seat is a model-stage with its candidates. One candidate is chosen for each seat so that
  - in every stage, the seats on one pool use disjoint GPUs: sum of `gpus` <= the pool's GPUs; where a stage's
    seats run in turn instead, each may use all of them, the stage lasts as long as all together and their
    persistent bytes may all meet on one GPU;
  - on every pool, sum over stages of the largest persistent bytes + the largest transient bytes <= the pool's
    limit (a GPU hosts at most one seat of a stage, so this is the worst overlap that can meet on one GPU);
and the step is shortest: the stages one after the other, a stage as long as its slowest seat (`SYNC`), or
generation beside the other two (`OVERLAP`), plus the weight publications of coupled seats with unequal
layouts. This file only defines; `evaluate` is the definition that every solver is tested against.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Timing = Literal["sync", "overlap"]

GENERATION, INFERENCE, TRAINING = 0, 1, 2
NUM_STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """One model-stage and its candidates, as equal-length arrays.

    `layout` is equal for two candidates of coupled seats exactly when they may share their weights (same
    tp, pp, dp and pool). `sync_s` is the time to publish weights into the candidate when its partner has
    another layout; it is read from the serving seat of a pair only. `latency_s` in seconds, sizes in
    bytes per GPU.
    """

    name: str
    stage: int
    pool: Ints
    gpus: Ints
    persistent_bytes: Floats
    transient_bytes: Floats
    latency_s: Floats
    sync_s: Floats
    layout: Ints

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: Ints) -> Seat:
        """The seat with only these candidates, in this order."""
        return Seat(
            name=self.name,
            stage=self.stage,
            pool=self.pool[rows],
            gpus=self.gpus[rows],
            persistent_bytes=self.persistent_bytes[rows],
            transient_bytes=self.transient_bytes[rows],
            latency_s=self.latency_s[rows],
            sync_s=self.sync_s[rows],
            layout=self.layout[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimit:
    """GPUs of one kind and the bytes a plan may use on each of them (the margin is already taken off)."""

    num_gpus: int
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Seats, pools and the rules that join them.

    The seats of stages `in_turn` run one after another; pairs that `must_share` have one layout.

    `pairs` lists (serving seat, training seat) of each trained model. With `own_generation_pool` the
    generation seat's GPUs are used by nothing else in any stage, so its memory stands alone and nothing
    is shared.
    """

    seats: tuple[Seat, ...]
    pools: tuple[PoolLimit, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    timing: Timing = "sync"
    own_generation_pool: bool = False
    in_turn: frozenset[int] = frozenset()
    must_share: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        assert GENERATION not in self.in_turn, "generation has one seat"
        assert self.timing == "sync" or self.own_generation_pool, "I17: overlap needs generation alone"
        for serve, train in self.pairs:
            assert self.seats[serve].stage < self.seats[train].stage == TRAINING, "a pair serves, then trains"

    def owns_gpus(self, seat: int) -> bool:
        """Whether nothing else ever runs on the seat's GPUs."""
        return self.own_generation_pool and self.seats[seat].stage == GENERATION

    def partner(self, seat: int) -> int | None:
        """The other seat of the pair, if any."""
        for serve, train in self.pairs:
            if seat in (serve, train):
                return train if seat == serve else serve
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one choice costs and uses. `used_gpus[stage][pool]`; memory of the busiest GPU by pool."""

    step_s: float
    stage_s: tuple[float, ...]
    sync_s: float
    used_gpus: tuple[tuple[int, ...], ...]
    memory_bytes: tuple[float, ...]
    feasible: bool


def step_time(timing: Timing, stage_s: tuple[float, ...], sync_s: float) -> float:
    """Seconds of a step from its stages; stage times already hold what is inside a stage."""
    generation, inference, training = stage_s
    if timing == "sync":
        return generation + inference + training + sync_s
    return max(generation, inference + training) + sync_s


def evaluate(problem: Problem, picks: Mapping[int, int]) -> Evaluation:
    """Cost and use of choosing candidate `picks[i]` for seat i. The plain definition, rule by rule."""
    stage_s = [0.0] * NUM_STAGES
    used = [[0] * len(problem.pools) for _ in range(NUM_STAGES)]
    persistent = [[0.0] * len(problem.pools) for _ in range(NUM_STAGES)]
    transient = [0.0] * len(problem.pools)
    own = [0] * len(problem.pools)
    alone: list[tuple[int, float]] = []
    sync_s = 0.0
    shared = {
        serve
        for serve, train in problem.pairs
        if not problem.owns_gpus(serve)
        and problem.seats[serve].layout[picks[serve]] == problem.seats[train].layout[picks[train]]
    }
    serving = {serve for serve, _ in problem.pairs}
    for index, seat in enumerate(problem.seats):
        row = picks[index]
        pool = int(seat.pool[row])
        weights = 0.0 if index in shared else float(seat.persistent_bytes[row])
        combine: Callable[[float, float], float] = operator.add if seat.stage in problem.in_turn else max
        stage_s[seat.stage] = combine(stage_s[seat.stage], float(seat.latency_s[row]))
        if index in serving and index not in shared:
            sync_s += float(seat.sync_s[row])
        if problem.owns_gpus(index):
            own[pool] += int(seat.gpus[row])
            alone.append((pool, weights + float(seat.transient_bytes[row])))
        else:
            count = max if seat.stage in problem.in_turn else operator.add
            used[seat.stage][pool] = count(used[seat.stage][pool], int(seat.gpus[row]))
            persistent[seat.stage][pool] = combine(persistent[seat.stage][pool], weights)
            transient[pool] = max(transient[pool], float(seat.transient_bytes[row]))
    used = [[taken + kept for taken, kept in zip(row, own, strict=True)] for row in used]
    memory = [sum(by_pool[k] for by_pool in persistent) + transient[k] for k in range(len(problem.pools))]
    for pool, size in alone:
        memory[pool] = max(memory[pool], size)
    feasible = all(serve in shared for serve, _ in problem.must_share) and all(
        memory[k] <= limit.limit_bytes
        and all(used[stage][k] <= limit.num_gpus for stage in range(NUM_STAGES))
        for k, limit in enumerate(problem.pools)
    )
    return Evaluation(
        step_s=step_time(problem.timing, tuple(stage_s), sync_s),
        stage_s=tuple(stage_s),
        sync_s=sync_s,
        used_gpus=tuple(map(tuple, used)),
        memory_bytes=tuple(memory),
        feasible=feasible,
    )
