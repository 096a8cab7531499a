"""Cutting a problem into cases without couplings, each a list of independent pieces.

Two things couple the seats of a problem: a trained model's two seats share weights when their layouts
agree, and a seat may sit on any pool. Both are decided up front, case by case. In a case every pair
either shares (its two seats become one piece: one choice of a layout, seen in two stages) or does not
(two pieces, the publication always paid), and every piece has its pool. What "does not share" overcharges
when the layouts happen to agree is found at its true price in the case that shares, so the best case is
the best plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from nereus.planner.frontier import Staircase
from nereus.planner.problem import GENERATION, NUM_STAGES, TRAINING, Floats, Ints, Problem, Seat

Rows = tuple[Ints, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Candidates that are chosen together, on one pool. `rows[i]` are the candidate rows of `seats[i]`.

    `stages` are those in which the GPUs are taken, `latency_s` the time in those in which the piece works.
    `holds` is the stage whose persistent bytes it adds to, None where its GPUs are its own.
    """

    seats: tuple[int, ...]
    rows: Rows
    pool: int
    stages: tuple[int, ...]
    holds: int | None
    gpus: Ints
    persistent_bytes: Floats
    transient_bytes: Floats
    latency_s: dict[int, Floats]
    extra_s: Floats
    stairs: dict[int, Staircase] = field(default_factory=dict)
    """Staircases made so far, by stage: cases share pieces, and so these."""

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, keep: Ints) -> Piece:
        """The piece with only these candidates."""
        return replace(
            self,
            rows=tuple(rows[keep] for rows in self.rows),
            gpus=self.gpus[keep],
            persistent_bytes=self.persistent_bytes[keep],
            transient_bytes=self.transient_bytes[keep],
            latency_s={stage: latency[keep] for stage, latency in self.latency_s.items()},
            extra_s=self.extra_s[keep],
            stairs={},
        )

    def columns(self) -> list[Floats]:
        """What a better candidate must not exceed, the most telling first."""
        return [
            *self.latency_s.values(),
            self.gpus.astype(np.float64),
            self.persistent_bytes,
            self.transient_bytes,
            self.extra_s,
        ]

    def staircase(self, stage: int) -> Staircase:
        """What a budget of GPUs buys from this piece alone in a stage."""
        if stage not in self.stairs:
            latency = self.latency_s.get(stage)
            if latency is None:  # it only takes up room there
                self.stairs[stage] = Staircase(self.gpus.min(keepdims=True), np.zeros(1))
            else:
                self.stairs[stage] = Staircase.of(self.gpus, latency)
        return self.stairs[stage]


def cases(problem: Problem) -> Iterator[tuple[Piece, ...]]:
    """Every case of the problem as its pieces, in the order in which they are best joined.

    Generation on its own GPUs first (it narrows every stage), then training (it decides most),
    generation, the rest. Cases with an empty piece are left out.
    """
    alone = {
        (index, pool): piece
        for index, seat in enumerate(problem.seats)
        for pool in range(len(problem.pools))
        if len(piece := _single(problem, index, seat, pool))
    }
    joined = {
        (pair, pool): piece
        for pair in problem.pairs
        for pool in range(len(problem.pools))
        if not problem.owns_gpus(pair[0]) and len(piece := _shared(problem, pair, pool))
    }
    ways = [(True,) if pair in problem.must_share else (True, False) for pair in problem.pairs]
    for together in product(*ways):
        sharing = [pair for pair, yes in zip(problem.pairs, together, strict=True) if yes]
        covered = {seat for pair in sharing for seat in pair}
        options = [[joined[key] for key in joined if key[0] == pair] for pair in sharing]
        options += [
            [alone[key] for key in alone if key[0] == index]
            for index in range(len(problem.seats))
            if index not in covered
        ]
        for choice in product(*options):
            yield tuple(sorted(choice, key=_join_order))


def _join_order(piece: Piece) -> tuple[int, int]:
    if piece.holds is None:
        return 0, 0
    first = {TRAINING: 1, GENERATION: 2}.get(max(piece.latency_s), 3)
    return first, min(piece.seats)


def _single(problem: Problem, index: int, seat: Seat, pool: int) -> Piece:
    """A seat by itself; a serving seat pays for its weights' publication."""
    owns = problem.owns_gpus(index)
    serves = any(index == serve for serve, _ in problem.pairs)
    latency, extra = seat.latency_s, seat.sync_s if serves else np.zeros(len(seat))
    lone = sum(other.stage == seat.stage for other in problem.seats) == 1
    if serves and lone and problem.timing == "sync":
        # Alone in its stage: the publication lengthens the stage, which makes the stage's bound tighter.
        latency, extra = latency + extra, np.zeros(len(seat))
    if owns:
        fits = seat.persistent_bytes + seat.transient_bytes <= problem.pools[pool].limit_bytes
        rows = np.flatnonzero((seat.pool == pool) & fits)
    else:
        rows = np.flatnonzero(seat.pool == pool)
    return Piece(
        seats=(index,),
        rows=(rows,),
        pool=pool,
        stages=tuple(range(NUM_STAGES)) if owns else (seat.stage,),
        holds=None if owns else seat.stage,
        gpus=seat.gpus[rows],
        persistent_bytes=seat.persistent_bytes[rows],
        transient_bytes=seat.transient_bytes[rows],
        latency_s={seat.stage: latency[rows]},
        extra_s=extra[rows],
    )


def _shared(problem: Problem, pair: tuple[int, int], pool: int) -> Piece:
    """A pair with one layout: all couples of candidates that agree; the weights are the trainer's."""
    serve, train = (problem.seats[index] for index in pair)
    mine = np.flatnonzero(train.pool == pool)
    theirs = np.flatnonzero(serve.pool == pool)
    theirs = theirs[np.argsort(serve.layout[theirs], kind="stable")]
    layouts = serve.layout[theirs]
    first = np.searchsorted(layouts, train.layout[mine], side="left")
    count = np.searchsorted(layouts, train.layout[mine], side="right") - first
    rows_train = np.repeat(mine, count)
    ends = np.cumsum(count)
    within = np.arange(len(rows_train)) - np.repeat(ends - count, count)
    rows_serve = theirs[np.repeat(first, count) + within]
    return Piece(
        seats=pair,
        rows=(rows_serve, rows_train),
        pool=pool,
        stages=(serve.stage, train.stage),
        holds=train.stage,
        gpus=train.gpus[rows_train],
        persistent_bytes=train.persistent_bytes[rows_train],
        transient_bytes=np.maximum(serve.transient_bytes[rows_serve], train.transient_bytes[rows_train]),
        latency_s={serve.stage: serve.latency_s[rows_serve], train.stage: train.latency_s[rows_train]},
        extra_s=np.zeros(len(rows_train)),
    )
