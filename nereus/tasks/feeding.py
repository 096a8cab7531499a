"""Rows fed to the units of a generation stage as these have room, so that all of them end together.

    driver   first rows ──▶ every unit          unit 0 ── 3 whole ──▶ driver ── the next 3 rows ──▶ unit 0
             (as many as it has slots)          unit 1 ── 1 whole ──▶ driver ── the next row ─────▶ unit 1

Nobody knows how long a response becomes. Dealt beforehand, the unit with the longest rows ends last and the
others idle; so a row is bound to a unit only when it can begin there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from nereus.emu.batch import PromptBatch, Rollouts, Sampling, join_rows
from nereus.emu.cluster import Call
from nereus.emu.engines.feeding import Fed
from nereus.emu.layout import Rank
from nereus.tasks.job import Job
from nereus.tasks.turning import in_turning_order


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
        self._whole = [0] * num_units

    @property
    def has_more(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting)

    def given(self, unit: int) -> list[int]:
        """The rows that a unit was given, in that order."""
        return self._given[unit]

    def take(self, unit: int, num_whole: int) -> list[int]:
        """What a unit gets that has answered so many rows since it was last asked; maybe nothing."""
        self._whole[unit] += num_whole
        free = self._slots - len(self._given[unit]) + self._whole[unit]
        taken = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._given[unit] += taken
        return taken


def run_fed(
    job: Job,
    stage: str,
    prompts: PromptBatch,
    order: Sequence[int],
    sampling: Sampling,
    version: int,
    *,
    slots: int | None,
    what: str = "generate",
) -> Rollouts:
    """Answer all prompts, begun in this order; rows of the result are in theirs.

    A unit decodes `slots` rows at once, None: all of its share. Neither slots, order nor units have an
    influence on what is sampled. `what` names the work in errors.
    """
    units = job.stages[stage].units
    unit_of = {unit.ranks[0]: number for number, unit in enumerate(units)}
    pool = Pool(list(order), len(units), slots)
    open_units: set[int] = set()  # those that were told of more rows
    parts: list[Rollouts] = []
    rows: list[int] = []

    def calls(unit: int, fresh: Sequence[int], *, begin: bool) -> dict[Rank, Call]:
        open_units.discard(unit)
        if pool.has_more:
            open_units.add(unit)
        part = prompts.select(torch.tensor(fresh, dtype=torch.long))
        call = Call("feed", (stage, part, sampling, version, begin, pool.has_more))
        return dict.fromkeys(units[unit].ranks, call)

    def answer(rank: Rank, fed: Fed | None) -> Mapping[Rank, Call]:
        if rank not in unit_of:
            return {}
        assert fed is not None, "the first rank of a unit answers for it"
        unit = unit_of[rank]
        if fed.rollouts is not None:
            rows.extend(pool.given(unit)[row] for row in fed.rows_n.tolist())
            parts.append(fed.rollouts)
        if unit not in open_units:
            return {}
        return calls(unit, pool.take(unit, len(fed.rows_n)), begin=False)

    first: dict[Rank, Call] = {}
    for unit in range(len(units)):
        if pool.given(unit):
            first |= calls(unit, pool.given(unit), begin=True)
    job.cluster.converse(first, answer, what=what)
    assert sorted(rows) == list(range(prompts.num_rows)), "every row is answered once"
    return join_rows(parts, torch.argsort(torch.tensor(rows)))
