"""What a replay runs under: for every step the nodes, the responses' lengths and the machine's speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nereus.errors import DataError, explain
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.held import GRID
from nereus.planner.interruption import Surprise
from nereus.planner.lengths import LengthDistribution

_STEP = math.log(GRID)  # lengths are rounded to steps of 3 %, so that equal questions are asked once


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Response lengths of one step, in tokens."""

    mean: float
    p95: float
    maximum: float

    @property
    def distribution(self) -> LengthDistribution:
        """The histogram, its mean and its shape rounded to steps of 3 %."""
        p95, longest = _power(self.p95 / self.mean), _power(self.maximum / self.mean)
        return _distribution(_power(self.mean), p95, longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The machine against its tables: shares of the nominal speed of computing and of the network."""

    compute: float = 1.0
    network: float = 1.0

    @property
    def calibration(self) -> Calibration:
        """The factors on predicted times that this amounts to."""
        return replace(NEUTRAL.with_compute(1 / self.compute), scale_out=1 / self.network)


NOMINAL = Speed()


@dataclass(frozen=True, slots=True, kw_only=True)
class SupplyEvent:
    """A node joins, or leaves; a departure is announced `notice_s` before."""

    at_s: float
    node: int
    joins: bool
    notice_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """One step. `nodes` are there when it begins; `surprises` are those of them that leave during it without
    a warning that reached an earlier boundary, in the order in which they go. `draining` maps nodes to the
    seconds, from this boundary, after which they leave.
    """

    nodes: frozenset[int]
    surprises: tuple[Surprise, ...]
    draining: tuple[tuple[int, float], ...]
    lengths: Lengths
    speed: Speed

    @property
    def breaking(self) -> frozenset[int]:
        """The nodes of the surprises."""
        return frozenset(surprise.node for surprise in self.surprises)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The conditions of every step, alike for every policy; `step_s` is what a step spans of it."""

    name: str
    step_s: float
    steps: tuple[Conditions, ...]

    @property
    def most_nodes(self) -> int:
        """The most nodes at any step."""
        return max(len(step.nodes) for step in self.steps)


def trace_of(
    name: str,
    supply: Sequence[SupplyEvent],
    lengths: Sequence[Lengths],
    speeds: Sequence[Speed] = (),
    *,
    step_s: float,
    most_nodes: int,
) -> Trace:
    """Put supply events, by time, and lengths and speeds, by step, on one axis of steps.

    Step k spans [k, k+1) * step_s. Nodes beyond `most_nodes` at once are left out. Raises DataError for a
    trace without a node at the first step, or speeds of another length. Later steps may have none: the job
    then stalls.
    """
    if not lengths or (speeds and len(speeds) != len(lengths)):
        raise DataError(
            explain(
                f"cannot make the trace {name}",
                values=f"{len(lengths)} lengths, {len(speeds)} speeds",
                rule="there is a step, and a speed for every length where speeds are given",
            )
        )
    events = sorted(_capped(supply, most_nodes), key=lambda event: event.at_s)
    steps: list[Conditions] = []
    nodes: set[int] = set()
    at = 0
    for number, length in enumerate(lengths):
        begin, end = number * step_s, (number + 1) * step_s
        while at < len(events) and events[at].at_s <= begin:
            nodes = nodes | {events[at].node} if events[at].joins else nodes - {events[at].node}
            at += 1
        leaving = [event for event in events[at:] if not event.joins and event.node in nodes]
        steps.append(
            Conditions(
                nodes=frozenset(nodes),
                surprises=tuple(
                    Surprise(
                        node=event.node,
                        told=(event.at_s - event.notice_s - begin) / step_s,
                        gone=(event.at_s - begin) / step_s,
                    )
                    for event in leaving
                    if event.at_s < end and event.at_s - event.notice_s > begin
                ),
                draining=tuple((e.node, e.at_s - begin) for e in leaving if e.at_s - e.notice_s <= begin),
                lengths=length,
                speed=speeds[number] if speeds else NOMINAL,
            )
        )
    if not steps[0].nodes:
        raise DataError(
            explain(
                f"cannot replay the trace {name}",
                values="no node is there at the beginning",
                rule="a job starts on at least one node",
                remedy="begin where nodes are (--skip)",
            )
        )
    return Trace(name=name, step_s=step_s, steps=tuple(steps))


def _capped(events: Sequence[SupplyEvent], most: int) -> list[SupplyEvent]:
    """Without the nodes beyond `most` at once; a freed place is taken by the next to join."""
    kept: list[SupplyEvent] = []
    present: set[int] = set()
    for event in sorted(events, key=lambda event: (event.at_s, event.joins)):
        if event.joins and len(present) < most:
            present.add(event.node)
        elif not event.joins and event.node in present:
            present.remove(event.node)
        else:
            continue
        kept.append(event)
    return kept


def _power(value: float) -> int:
    """The nearest power of the grid."""
    return round(math.log(value) / _STEP)


@lru_cache(maxsize=4096)
def _distribution(mean: int, p95: int, maximum: int) -> LengthDistribution:
    """From powers of the grid: the mean in tokens, the other two as multiples of it."""
    p95 = max(p95, 0)
    unit = LengthDistribution.from_mean_p95_max(1.0, GRID**p95, max(GRID**p95, GRID**maximum))
    edges = tuple(edge * GRID**mean for edge in unit.edges_tokens)
    return LengthDistribution(edges_tokens=edges, shares=unit.shares)
