"""Synthetic traces from a seed: spot supply with heavy-tailed intervals, growing lengths, slow spells."""

from __future__ import annotations

import numpy as np

from nereus.planner.conditions import Lengths, Speed, SupplyEvent
from nereus.planner.traces import MAX_OF_MEAN, P95_OF_MEAN


def steady_supply(num_nodes: int) -> tuple[SupplyEvent, ...]:
    """The same nodes all the time."""
    return tuple(SupplyEvent(at_s=0.0, node=node, joins=True) for node in range(num_nodes))


def spot_supply(
    seed: int,
    *,
    duration_s: float,
    least: int,
    most: int,
    mean_interval_s: float = 1200.0,
    variation: float = 3.0,
    notice_s: float = 120.0,
) -> tuple[SupplyEvent, ...]:
    """Nodes that come and go in bursts, between `least` and `most`.

    Intervals are hyper-exponential with the given coefficient of variation (published spot traces have
    2.6-4.4), bursts geometric with mean 2; the node that leaves is any.
    """
    rng = np.random.default_rng((seed, 1))
    # Balanced means: with probability p a short interval of mean m/2p, otherwise a long one.
    p = (1 + np.sqrt((variation**2 - 1) / (variation**2 + 1))) / 2
    present = list(range((least + most + 1) // 2))
    events = [SupplyEvent(at_s=0.0, node=node, joins=True) for node in present]
    at, fresh = 0.0, len(present)
    while True:
        share = p if rng.random() < p else 1 - p
        at += float(rng.exponential(mean_interval_s / (2 * share)))
        if at >= duration_s:
            return tuple(events)
        joins = bool(rng.random() < (most - len(present)) / (most - least))
        for _ in range(int(rng.geometric(0.5))):
            if joins and len(present) < most:
                present.append(fresh)
                events.append(SupplyEvent(at_s=at, node=fresh, joins=True))
                fresh += 1
            elif not joins and len(present) > least:
                node = present.pop(int(rng.integers(len(present))))
                events.append(SupplyEvent(at_s=at, node=node, joins=False, notice_s=notice_s))


def growing_supply(start: int, end: int, *, duration_s: float, stages: int) -> tuple[SupplyEvent, ...]:
    """Nodes added in equal portions, equally spaced: a job that is given more and more of a cluster."""
    counts = np.linspace(start, end, stages).round().astype(int)
    events = []
    before = 0
    for number, count in enumerate(counts.tolist()):
        at = number * duration_s / stages
        events += [SupplyEvent(at_s=at, node=node, joins=True) for node in range(before, count)]
        before = max(before, count)
    return tuple(events)


def growing_lengths(
    seed: int, num_steps: int, *, start: float, end: float, noise: float = 0.05, limit: float | None = None
) -> tuple[Lengths, ...]:
    """Mean lengths that rise from `start` to `end` tokens along a logistic curve of their logarithm.

    The shape is that of published reasoning runs, in which the length rises most in the middle; `noise` is
    the relative deviation from step to step, `limit` the longest response that is allowed.
    """
    rng = np.random.default_rng((seed, 2))
    at = np.linspace(-4, 4, num_steps)
    rise = (1 / (1 + np.exp(-at)) - 1 / (1 + np.exp(4))) / (1 - 2 / (1 + np.exp(4)))
    means = start * (end / start) ** rise * np.exp(noise * rng.standard_normal(num_steps))
    return tuple(lengths_of(mean, limit) for mean in means.tolist())


def lengths_of(mean: float, limit: float | None = None) -> Lengths:
    """A mean with the usual shape around it, cut at a limit."""
    longest = MAX_OF_MEAN * mean if limit is None else max(min(MAX_OF_MEAN * mean, limit), 1.2 * mean)
    return Lengths(mean=mean, p95=min(P95_OF_MEAN * mean, longest), maximum=longest)


def slow_spells(
    seed: int,
    num_steps: int,
    *,
    compute: float = 0.85,
    network: float = 0.5,
    spell_steps: float = 40.0,
    share: float = 0.25,
) -> tuple[Speed, ...]:
    """Spells of slow computing (heat) and of a slow network (neighbours), each independently.

    A spell lasts `spell_steps` on average and such steps are `share` of all.
    """
    rng = np.random.default_rng((seed, 3))
    slow = np.zeros((2, num_steps), dtype=bool)
    for row in slow:
        state = False
        for step in range(num_steps):
            ends = rng.random() < 1 / spell_steps
            begins = rng.random() < share / (1 - share) / spell_steps
            state = not ends if state else bool(begins)
            row[step] = state
    return tuple(
        Speed(compute=compute if hot else 1.0, network=network if busy else 1.0)
        for hot, busy in slow.T.tolist()
    )
