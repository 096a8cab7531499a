"""Rows fed to the units of a generation stage as these have room, so that all of them end together.

    driver   first rows ──▶ every unit          unit 0 ── 3 whole ──▶ driver ── the next 3 rows ──▶ unit 0
             (as many as it has slots)          unit 1 ── 1 whole ──▶ driver ── the next row ─────▶ unit 1

Nobody knows how long a response becomes. Dealt beforehand, the unit with the longest rows ends last and the
others idle; so a row is bound to a unit only when it can begin there.

A row whose turn ended may come back with what a tool said, see `turns.py`: it waits for a place as others do,
on whichever unit has one, while the rows beside it run on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.cluster import Answer, Call
from nereus.emu.engines.feeding import Fed
from nereus.emu.layout import Rank
from nereus.tasks.early import Early
from nereus.tasks.job import Job
from nereus.tasks.turning import in_turning_order


class Rows(Protocol):
    """The rows that are to be answered, by number."""

    @property
    def come_back(self) -> bool:
        """Whether a row may be given again after it was taken."""
        ...

    def prompts(self, rows: Sequence[int]) -> PromptBatch:
        """What a unit is given of these rows."""
        ...

    def take(self, rows: Sequence[int], part: Rollouts) -> None:
        """What the engine has answered."""
        ...

    def back(self, *, wait: bool) -> Sequence[int]:
        """The rows that have come back since this was last asked, each to be given again. With `wait` there
        is one at least, unless none will ever come.
        """
        ...


@dataclass(kw_only=True)
class Plain:
    """Rows that are answered once."""

    batch: PromptBatch
    _numbers: list[int] = field(default_factory=list)
    _parts: list[Rollouts] = field(default_factory=list)

    @property
    def come_back(self) -> bool:
        """None does."""
        return False

    def prompts(self, rows: Sequence[int]) -> PromptBatch:
        """The rows themselves."""
        return self.batch.select(rows)

    def take(self, rows: Sequence[int], part: Rollouts) -> None:
        """Keep them."""
        self._numbers += rows
        self._parts.append(part)

    def back(self, *, wait: bool) -> Sequence[int]:
        """None."""
        return ()

    def rollouts(self) -> Rollouts:
        """All rows, in their order."""
        assert sorted(self._numbers) == list(range(self.batch.num_rows)), "every row is answered once"
        return join_rows(self._parts, torch.argsort(torch.tensor(self._numbers)))


class Pool:
    """Which rows go to which unit. Pure.

    A unit holds `slots` rows at once (None: all of its share). As long as there are more rows than slots, a
    row that ends is replaced on its own unit by the next one in order.
    """

    def __init__(self, order: Sequence[int], num_units: int, slots: int | None) -> None:
        at_once = len(order) if slots is None else min(len(order), slots * num_units)
        self._slots = slots or len(order)
        self._waiting = deque(order[at_once:])
        self._given = in_turning_order(order[:at_once], num_units)
        self._ended = [0] * num_units

    @property
    def has_more(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting)

    def given(self, unit: int) -> list[int]:
        """The rows that a unit was given, in that order."""
        return self._given[unit]

    def num_running(self, unit: int) -> int:
        """The rows of a unit that have not ended."""
        return len(self._given[unit]) - self._ended[unit]

    def come_back(self, rows: Sequence[int]) -> None:
        """These rows wait, before those that were never given: what they began is to be ended."""
        self._waiting.extendleft(reversed(rows))

    def take(self, unit: int, num_ended: int, *, fair: bool = False) -> list[int]:
        """What a unit gets of whose rows so many ended since it was last asked; maybe nothing. If `fair`, it
        has no more than its share of all rows that wait or run.
        """
        self._ended[unit] += num_ended
        free = self._slots - self.num_running(unit)
        if fair:
            num_units = len(self._given)
            living = len(self._waiting) + sum(map(self.num_running, range(num_units)))
            free = min(free, -(-living // num_units) - self.num_running(unit))
        taken = [self._waiting.popleft() for _ in range(min(max(free, 0), len(self._waiting)))]
        self._given[unit] += taken
        return taken


def run_fed(
    job: Job,
    stage: str,
    rows: Rows,
    order: Sequence[int],
    sampling: Sampling,
    version: int,
    *,
    slots: int | None,
    what: str = "generate",
    early: Early | None = None,
) -> None:
    """Answer all rows, begun in this order.

    A unit decodes `slots` rows at once, None: all of its share. Neither slots, order nor units have an
    influence on what is sampled. With `early`, units that get no more rows score those that are whole.
    """
    feeding = _Feeding(job, stage, rows, order, sampling, version, slots, early)
    between = feeding.between if rows.come_back else None
    then = feeding.answer if early is None else early.beside(feeding.answer)
    job.cluster.converse(feeding.begin(), then, what=what, between=between)


class _Feeding:
    """The driver's side of one conversation with all units.

    A unit is open as long as it was told of more rows. One that has nothing to do rests, and a session ends
    when its unit is told of no more.
    """

    def __init__(
        self,
        job: Job,
        stage: str,
        rows: Rows,
        order: Sequence[int],
        sampling: Sampling,
        version: int,
        slots: int | None,
        early: Early | None,
    ) -> None:
        self._stage, self._rows, self._sampling, self._version = stage, rows, sampling, version
        self._early = early
        self._units = job.stages[stage].units
        self._unit_of = {unit.ranks[0]: number for number, unit in enumerate(self._units)}
        self._pool = Pool(list(order), len(self._units), slots)
        self._open: set[int] = set()
        self._resting: set[int] = set()

    def begin(self) -> dict[Rank, Call]:
        """The first calls."""
        calls: dict[Rank, Call] = {}
        for unit in range(len(self._units)):
            if given := self._pool.given(unit):
                calls |= self._call(unit, given, begin=True)
            else:
                self._end(unit)
        return calls

    def answer(self, answer: Answer) -> Mapping[Rank, Call]:
        """What a unit that has answered gets to do next."""
        if answer.rank not in self._unit_of:
            return {}
        fed: Fed | None = answer.result
        assert fed is not None, "the first rank of a unit answers for it"
        unit = self._unit_of[answer.rank]
        if fed.rollouts is not None:
            given = self._pool.given(unit)
            numbers = [given[row] for row in fed.rows_n.tolist()]
            self._rows.take(numbers, fed.rollouts)
            if self._early is not None:
                self._early.take_rows(self._units[unit], numbers, fed.rollouts.batch)
        self._pool.come_back(self._rows.back(wait=False))
        if unit not in self._open:
            self._end(unit)
            return {}
        fresh = self._pool.take(unit, len(fed.rows_n), fair=self._rows.come_back)
        if self._rows.come_back and not self._pool.num_running(unit):
            self._resting.add(unit)
            return {}
        return self._call(unit, fresh, begin=False)

    def _end(self, unit: int) -> None:
        """A unit gets no more rows."""
        if self._early is not None:
            self._early.end(self._units[unit])

    def between(self, idle: bool) -> Mapping[Rank, Call]:
        """Work for units that rest; if no call is under way it waits for some, and ends all sessions if none
        comes.
        """
        self._pool.come_back(self._rows.back(wait=idle and not self._pool.has_more))
        calls: dict[Rank, Call] = {}
        for unit in sorted(self._resting):
            if fresh := self._pool.take(unit, 0, fair=True):
                self._resting.discard(unit)
                calls |= self._call(unit, fresh, begin=False)
        if not idle or calls:
            return calls
        assert not self._pool.has_more, "a unit that rests takes a row that waits"
        ending, self._resting = sorted(self._resting), set()
        for unit in ending:
            calls |= self._call(unit, (), begin=False, end=True)
        return calls

    def _call(self, unit: int, fresh: Sequence[int], *, begin: bool, end: bool = False) -> dict[Rank, Call]:
        more = not end and (self._rows.come_back or self._pool.has_more)
        self._open.discard(unit)
        if more:
            self._open.add(unit)
        part = self._rows.prompts(fresh)
        call = Call("feed", (self._stage, part, self._sampling, self._version, begin, more))
        return dict.fromkeys(self._units[unit].ranks, call)
