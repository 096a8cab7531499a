"""Partial plans of one case: extending them piece by piece, and what they cost at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus.planner.frontier import Staircase, non_dominated
from nereus.planner.pieces import Piece
from nereus.planner.problem import NUM_STAGES, Floats, Ints, Problem

_PAIRS_AT_ONCE = 1 << 18  # bounds the memory of one join


@dataclass(frozen=True, slots=True, eq=False)
class PartialPlans:
    """Partial plans, one a column. `low[s]` bounds stage s from below for every completion."""

    used: Ints  # [stage, pool, plan]
    persistent: Floats  # [stage, pool, plan]
    transient: Floats  # [pool, plan]
    low: Floats  # [stage, plan]
    extra: Floats  # [plan]
    rows: tuple[Ints, ...]  # [piece][plan] -> row of the piece

    def __len__(self) -> int:
        return len(self.extra)

    def take(self, keep: Ints | slice) -> PartialPlans:
        return PartialPlans(
            self.used[:, :, keep],
            self.persistent[:, :, keep],
            self.transient[:, keep],
            self.low[:, keep],
            self.extra[keep],
            tuple(row[keep] for row in self.rows),
        )


class Case:
    """One case on its way: its pieces, and what the remaining ones cost at least after each join."""

    def __init__(self, problem: Problem, pieces: tuple[Piece, ...]) -> None:
        self.problem = problem
        self.pieces = pieces
        self._tables: dict[tuple[frozenset[int], int, int], Floats] = {}
        self._root: PartialPlans | None = None

    def replace_pieces(self, pieces: tuple[Piece, ...]) -> None:
        """Go on with fewer candidates; the bounds are made anew when asked for."""
        self.pieces = pieces
        self._tables.clear()
        self._root = None

    def root(self) -> PartialPlans:
        """The empty plan. Every piece must add at least its smallest bytes, which is known already."""
        if self._root is None:
            self._root = self._make_root()
        return self._root

    def _make_root(self) -> PartialPlans:
        num_pools = len(self.problem.pools)
        persistent = np.zeros((NUM_STAGES, num_pools, 1))
        transient = np.zeros((num_pools, 1))
        for piece in self.pieces:
            if piece.holds is not None:
                here, least = persistent[piece.holds, piece.pool], piece.persistent_bytes.min()
                here[:] = here + least if piece.holds in self.problem.in_turn else np.maximum(here, least)
                on_top = transient[piece.pool]
                np.maximum(on_top, piece.transient_bytes.min(), out=on_top)
        everyone = frozenset(range(len(self.pieces)))
        low = np.array([[self._least(everyone, stage)] for stage in range(NUM_STAGES)])
        return PartialPlans(
            np.zeros((NUM_STAGES, num_pools, 1), dtype=np.int64),
            persistent,
            transient,
            low,
            np.array([self.extra(everyone)]),
            (),
        )

    def _least(self, everyone: frozenset[int], stage: int) -> float:
        """Seconds that a stage takes at least, with all GPUs free."""
        if stage in self.problem.in_turn:
            return sum(float(p.latency_s[stage].min()) for p in self.pieces if stage in p.latency_s)
        return max(
            float(self.table(everyone, stage, pool)[limit.num_gpus])
            for pool, limit in enumerate(self.problem.pools)
        )

    def extra(self, remaining: frozenset[int]) -> float:
        """Least publication time that these pieces add."""
        return sum(float(self.pieces[index].extra_s.min()) for index in remaining)

    def table(self, remaining: frozenset[int], stage: int, pool: int) -> Floats:
        """What the remaining pieces' part of a stage takes at least, by free GPUs of the pool."""
        there = frozenset(
            index
            for index in remaining
            if self.pieces[index].pool == pool and stage in self.pieces[index].stages
        )
        key = (there, stage, pool)
        if key not in self._tables:
            num_gpus = self.problem.pools[pool].num_gpus
            parts = [self.pieces[index].staircase(stage) for index in sorted(there)]
            self._tables[key] = Staircase.together(parts).table(num_gpus) if parts else np.zeros(num_gpus + 1)
        return self._tables[key]

    def bound(self, plans: PartialPlans) -> Floats:
        """Lower bound of the step, by partial plan; exact when no piece remains."""
        return self._compose([*plans.low], plans.extra)

    def _compose(self, low: Sequence[Floats], extra: Floats) -> Floats:
        generation, inference, training = low
        if self.problem.timing == "sync":
            return generation + inference + training + extra
        return np.maximum(generation, inference + training) + extra

    def join(
        self, plans: PartialPlans, index: int, remaining: frozenset[int], upper: float
    ) -> tuple[Ints, Ints, Floats]:
        """All (plan, candidate of piece `index`) that fit with a bound below `upper`, and the bounds."""
        found = [
            self._join_some(plans, start, index, remaining, upper)
            for start in range(0, len(plans), max(1, _PAIRS_AT_ONCE // max(1, len(self.pieces[index]))))
        ]
        if not found:
            none = np.zeros(0, dtype=np.int64)
            return none, none, np.zeros(0)
        plan, row, bound = (np.concatenate(part) for part in zip(*found, strict=True))
        return plan, row, bound

    def _join_some(
        self, plans: PartialPlans, start: int, index: int, remaining: frozenset[int], upper: float
    ) -> tuple[Ints, Ints, Floats]:
        piece = self.pieces[index]
        pool = piece.pool
        some = slice(start, start + max(1, _PAIRS_AT_ONCE // max(1, len(piece))))
        limit = self.problem.pools[pool]
        fits = np.ones((len(plans.extra[some]), len(piece)), dtype=bool)
        if piece.holds is not None:
            held = plans.persistent[:, pool, some]
            others = held.sum(axis=0) - held[piece.holds]
            total = self._held(piece, held[piece.holds][:, None], piece.persistent_bytes)
            total += np.maximum(plans.transient[pool, some][:, None], piece.transient_bytes)
            total += others[:, None]
            fits &= total <= limit.limit_bytes
        low: list[Floats] = []
        for stage in range(NUM_STAGES):
            value = plans.low[stage, some][:, None]
            if stage in piece.stages:
                free = (limit.num_gpus - plans.used[stage, pool, some])[:, None] - piece.gpus
                fits &= free >= 0
                latency = piece.latency_s.get(stage)
                if stage not in self.problem.in_turn:
                    rest = self.table(remaining, stage, pool)[np.maximum(free, 0)]
                    value = np.maximum(value, rest if latency is None else np.maximum(rest, latency))
                elif latency is not None:
                    value = value + (latency - latency.min())
            low.append(value)
        extra = plans.extra[some][:, None] + (piece.extra_s - piece.extra_s.min())
        bound = self._compose(low, extra)
        fits &= bound < upper
        plan, row = np.nonzero(fits)
        return plan + start, row, bound[plan, row]

    def extend(
        self, plans: PartialPlans, index: int, remaining: frozenset[int], plan: Ints, row: Ints
    ) -> PartialPlans:
        """The longer partial plans made of these couples."""
        piece = self.pieces[index]
        grown = plans.take(plan)
        pool, gpus = piece.pool, piece.gpus[row]
        if piece.holds is not None:
            held = grown.persistent[piece.holds, pool]
            held[:] = self._held(piece, held, piece.persistent_bytes[row])
            np.maximum(grown.transient[pool], piece.transient_bytes[row], out=grown.transient[pool])
        for stage in piece.stages:
            in_turn, works = stage in self.problem.in_turn, stage in piece.latency_s
            if in_turn and works:  # it gives its GPUs back
                grown.low[stage] += piece.latency_s[stage][row] - piece.latency_s[stage].min()
                continue
            grown.used[stage, pool] += gpus
            if in_turn:
                continue
            free = self.problem.pools[pool].num_gpus - grown.used[stage, pool]
            np.maximum(grown.low[stage], self.table(remaining, stage, pool)[free], out=grown.low[stage])
            if works:
                np.maximum(grown.low[stage], piece.latency_s[stage][row], out=grown.low[stage])
        extra = grown.extra + (piece.extra_s[row] - piece.extra_s.min())
        return PartialPlans(
            grown.used, grown.persistent, grown.transient, grown.low, extra, (*grown.rows, row)
        )

    def _held(self, piece: Piece, held: Floats, more: Floats) -> Floats:
        """Persistent bytes of a stage with the piece's; what it adds at least is in `held` from the start."""
        if piece.holds in self.problem.in_turn:
            return np.asarray(held + (more - piece.persistent_bytes.min()))
        return np.maximum(held, more)

    def crowd_out(self, plans: PartialPlans, remaining: frozenset[int]) -> PartialPlans:
        """Drop the partial plans that another matches or beats in all that the remaining pieces can feel."""
        todo = [self.pieces[index] for index in remaining]
        open_stages = {stage for piece in todo for stage in piece.latency_s}
        settled = [stage for stage in range(NUM_STAGES) if stage not in open_stages]
        columns: list[Floats] = []
        if self.problem.timing == "sync":
            columns.append(plans.low[settled].sum(axis=0) + plans.extra)
            columns += [plans.low[stage] for stage in sorted(open_stages)]
        else:
            columns += [*plans.low, plans.extra]
        for pool in range(len(self.problem.pools)):
            held = {piece.holds for piece in todo if piece.pool == pool and piece.holds is not None}
            rest = [stage for stage in range(NUM_STAGES) if stage not in held]
            columns.append(plans.persistent[rest, pool].sum(axis=0))
            columns += [plans.persistent[stage, pool] for stage in sorted(held)]
            columns.append(plans.transient[pool])
            busy = {stage for piece in todo if piece.pool == pool for stage in piece.stages}
            columns += [plans.used[stage, pool].astype(np.float64) for stage in sorted(busy)]
        telling = [column for column in columns if column.min() < column.max()]
        return plans.take(non_dominated(telling)) if telling else plans.take(slice(0, 1))
