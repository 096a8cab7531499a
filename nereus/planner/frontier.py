"""Frontiers: the lowest latency for a GPU budget, and dominance between rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from nereus.planner.problem import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Staircase:
    """Points with rising `gpus` and falling `latency_s`: what a budget of GPUs buys in one stage."""

    gpus: Ints
    latency_s: Floats

    @classmethod
    def of(cls, gpus: Ints, latency_s: Floats) -> Self:
        """The staircase of candidates: the lowest latency over all that use at most so many GPUs."""
        order = np.lexsort((latency_s, gpus))
        g, low = gpus[order], np.minimum.accumulate(latency_s[order])
        step = np.empty(len(g), dtype=bool)
        if len(g):
            step[0] = True
            np.less(low[1:], low[:-1], out=step[1:])
        return cls(g[step], low[step])

    @classmethod
    def together(cls, parts: Sequence[Staircase]) -> Self:
        """What a budget buys when it is divided among concurrent seats, each stage as long as its slowest.

        A latency T is within reach of exactly the budgets >= sum over seats of the fewest GPUs for T, so the
        steps of the whole are among the seats' own latencies.
        """
        if len(parts) == 1:
            return cls(parts[0].gpus, parts[0].latency_s)
        latency = np.sort(np.concatenate([part.latency_s for part in parts]))
        need = np.zeros(len(latency), dtype=np.int64)
        reach = np.ones(len(latency), dtype=bool)
        for part in parts:
            if not len(part.gpus):
                return cls(np.zeros(0, dtype=np.int64), np.zeros(0))
            # First step whose latency is <= T; latencies fall, so search the reversed array.
            at = len(part.gpus) - np.searchsorted(part.latency_s[::-1], latency, side="right")
            reach &= at < len(part.gpus)
            need += part.gpus[np.minimum(at, len(part.gpus) - 1)]
        return cls.of(need[reach], latency[reach])

    def table(self, num_gpus: int) -> Floats:
        """Latency by budget, length `num_gpus` + 1: what b GPUs buy, infinite where nothing fits."""
        at = np.searchsorted(self.gpus, np.arange(num_gpus + 1), side="right") - 1
        if not len(self.gpus):
            return np.full(num_gpus + 1, np.inf)
        return np.where(at >= 0, self.latency_s[np.maximum(at, 0)], np.inf)


def non_dominated(columns: Sequence[Floats], block: int = 128) -> Ints:
    """Rows that no other row equals or beats in every column (all minimised); one of equal rows is kept.

    Exact. In lexicographic order a row can only be beaten by an earlier one, so each block is compared
    with the survivors before it, then inside itself.
    """
    size = len(columns[0])
    if size <= 1:
        return np.arange(size)
    matrix = np.stack(columns)
    order = np.lexsort(tuple(matrix[::-1]))
    matrix = matrix[:, order]
    kept = np.zeros((len(matrix), 0))
    rows: list[Ints] = []
    for start in range(0, size, block):
        part = matrix[:, start : start + block]
        alive = np.arange(part.shape[1])
        if kept.shape[1]:
            beaten = np.ones((kept.shape[1], part.shape[1]), dtype=bool)
            for old, new in zip(kept, part, strict=True):
                beaten &= old[:, None] <= new[None, :]
            alive = alive[~beaten.any(axis=0)]
            part = part[:, alive]
        inside = np.triu(np.ones((part.shape[1], part.shape[1]), dtype=bool), k=1)
        for row in part:
            inside &= row[:, None] <= row[None, :]
        free = ~inside.any(axis=0)
        kept = np.concatenate([kept, part[:, free]], axis=1)
        rows.append(order[start + alive[free]])
    return np.concatenate(rows)
