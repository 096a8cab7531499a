"""Early release: units that have no more rows to answer score those that are whole, while others go on.

    generation  unit 0  ████████████░░ critic ░░ reference ░│
                unit 1  ██████████████████████████████      │ the last row is whole
                unit 2  ███████████████░░ reference ░░░░    │
    inference                                               │ ▓▓ what is left

The longest responses decide when generation ends; until then most of its GPUs would rest. A unit of scoring
is free when none of its workers belongs to a unit of generation that still has rows.

Rows are scored in chunks, cut from the rows of one generation unit when that ends. A chunk holds the same
rows whoever scores it and when. So numbers do not depend on which unit was first where rows are dealt
beforehand; where they enter as others end, speed decides which rows run, and are scored, together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nereus.emu.batch import TokenBatch, join_rows
from nereus.emu.cluster import Answer, Call
from nereus.emu.layout import Layout, Rank
from nereus.errors import Cancelled, explain
from nereus.tasks.job import Job
from nereus.tasks.micro_batches import Limit
from nereus.tasks.scoring import Scoring, by_length, early_name, joined, scorings_of
from nereus.tasks.stages import GENERATION

Replies = Callable[[Answer], Mapping[Rank, Call]]
"""What a conversation with the workers sends at every answer."""
EARLY = "early"  # its name among what a step has done
_FILLS = 4  # a pipeline of pp stages then rests for (pp - 1) / (5 pp - 1) of a chunk: a fifth at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows of a step, by their numbers in it."""

    numbers: tuple[int, ...]
    rows: TokenBatch


@dataclass(kw_only=True)
class Work:
    """One kind of scoring: its chunks, and what came of those that are scored."""

    job: Job
    scoring: Scoring
    chunks: list[Chunk] = field(default_factory=list)
    _results: dict[int, Any] = field(default_factory=dict)
    _under_way: dict[Layout, tuple[int, Call]] = field(default_factory=dict)
    _seconds: float = 0.0
    _early_share: float | None = None

    @property
    def units(self) -> tuple[Layout, ...]:
        """Those that can do it."""
        return self.job.stages[self.scoring.stage].units

    @property
    def busy(self) -> set[Rank]:
        """Workers of the units that are at it."""
        return {rank for unit in self._under_way for rank in unit.ranks}

    @property
    def early_share(self) -> float:
        """The share of rows that was scored before generation ended."""
        if self._early_share is not None:
            return self._early_share
        sizes = [len(chunk.numbers) for chunk in self.chunks]
        return sum(sizes[index] for index in self._results) / sum(sizes)

    def cut(self, numbers: Sequence[int], rows: TokenBatch) -> None:
        """Further rows, in chunks of a micro-batch, or of enough of them to fill a pipeline."""
        pp = max(unit.pp for unit in self.units)
        depth = 1 if pp == 1 else _FILLS * pp
        for part in cut(rows, self.scoring.limit(self.job), depth):
            chosen = tuple(numbers[row] for row in part)
            self.chunks.append(Chunk(numbers=chosen, rows=rows.select(torch.tensor(part)).trimmed()))

    def call(self, unit: Layout) -> dict[Rank, Call]:
        """The next chunk for a free unit; nothing where none waits."""
        taken = self._results.keys() | {index for index, _ in self._under_way.values()}
        index = next((i for i in range(len(self.chunks)) if i not in taken), None)
        if index is None:
            return {}
        call = self.scoring.call(self.job, self.chunks[index].rows, aside=True)
        self._under_way[unit] = (index, call)
        return dict.fromkeys(unit.ranks, call)

    def take(self, answer: Answer) -> Layout | None:
        """What a unit found: its first worker answers for it. The unit that is free now, if any."""
        for unit, (index, call) in self._under_way.items():
            if call is answer.call and unit.ranks[0] == answer.rank:
                del self._under_way[unit]
                self._results[index] = answer.result
                self._seconds += answer.seconds
                return unit
        return None

    def finish(self) -> Any:
        """Score the chunks that are left, each on the unit that is free first; all results in the rows'
        order.
        """
        self._early_share = self.early_share
        self._under_way.clear()  # an earlier try may have failed in the middle
        cluster = self.job.cluster
        num_halts = cluster.num_halts

        def then(answer: Answer) -> Mapping[Rank, Call]:
            if cluster.num_halts != num_halts:  # another stage failed, and somebody recovers meanwhile
                raise Cancelled(explain(f"stopped in: {self.scoring.what}", remedy="run again with --resume"))
            free = self.take(answer)
            return {} if free is None else self.call(free)

        first = {rank: call for unit in self.units for rank, call in self.call(unit).items()}
        cluster.converse(first, then, what=self.scoring.what)
        # As if all units had had their share, which is what the planner counts on.
        cluster.add_busy_s(self.scoring.what, self._seconds / len(self.units))
        self._seconds = 0.0
        numbers = [number for chunk in self.chunks for number in chunk.numbers]
        parts = [self._results[index] for index in range(len(self.chunks))]
        order = torch.argsort(torch.tensor(numbers))
        return joined(parts, order)


class Early:
    """What generation's conversation tells of whole rows and of units that end, and the calls that follow."""

    def __init__(self, job: Job) -> None:
        self._work = {one.what: Work(job=job, scoring=one) for one in scorings_of(job.config)}
        self._answering = set(job.stages[GENERATION].ranks)
        self._whole: dict[Layout, list[tuple[Sequence[int], TokenBatch]]] = {}

    def work(self, scoring: Scoring) -> Work:
        """One kind of scoring; complete when generation has ended."""
        return self._work[scoring.what]

    def take_rows(self, unit: Layout, numbers: Sequence[int], rows: TokenBatch) -> None:
        """A unit of generation has answered these rows."""
        self._whole.setdefault(unit, []).append((numbers, rows))

    def end(self, unit: Layout) -> None:
        """A unit of generation gets no more rows."""
        parts = self._whole.pop(unit, [])
        if parts:
            numbers = [number for some, _ in parts for number in some]
            rows = join_rows([rows for _, rows in parts])
            for work in self._work.values():
                work.cut(numbers, rows)
        self._answering -= set(unit.ranks)

    def beside(self, then: Replies) -> Replies:
        """The replies of generation's conversation, and the calls of scoring beside them."""

        def replies(answer: Answer) -> Mapping[Rank, Call]:
            if not answer.call.aside:
                return {**then(answer), **self.calls()}
            for work in self._work.values():
                work.take(answer)
            return self.calls()

        return replies

    def calls(self) -> dict[Rank, Call]:
        """Chunks for units of scoring that are free; none once generation is over, so that its end waits for
        one chunk at most.
        """
        calls: dict[Rank, Call] = {}
        if not self._answering:
            return calls
        busy = self._answering.union(*(work.busy for work in self._work.values()))
        for work in self._work.values():
            for unit in work.units:
                if busy.isdisjoint(unit.ranks) and (given := work.call(unit)):
                    calls |= given
                    busy |= set(unit.ranks)
        return calls

    def stats(self) -> dict[str, float]:
        """The share of rows that was scored early, by kind."""
        return {early_name(what): work.early_share for what, work in self._work.items()}


def early_of(job: Job) -> Early | None:
    """What generation left of the step's scoring; None where all of it is left."""
    found = job.done.get(EARLY)
    assert found is None or isinstance(found, Early), EARLY
    return found


def may_score_early(job: Job) -> bool:
    """Whether generation's units may end apart and their rows are then the ones that are scored.

    Not so with tools, whose rows come back; with DAPO, which drops rows; and where generation runs ahead of
    training, on GPUs of its own.
    """
    config = job.config
    apart = config.staleness > 0 or config.algorithm.kind == "dapo" or job.tools is not None
    return not apart and len(job.stages[GENERATION].units) > 1 and bool(scorings_of(config))


def cut(rows: TokenBatch, limit: Limit, depth: int) -> list[list[int]]:
    """Rows in consecutive parts, longest first, of `depth` micro-batches each. Pure."""
    lengths = (rows.prompt_lens_b + rows.response_lens_b).tolist()
    parts: list[list[int]] = []
    for row in by_length(rows).tolist():
        part = parts[-1] if parts else None
        if part is None or not _has_room(part, row, lengths, limit, depth):
            parts.append(part := [])
        part.append(row)
    return parts


def _has_room(part: Sequence[int], row: int, lengths: Sequence[int], limit: Limit, depth: int) -> bool:
    if limit.tokens is None:
        return len(part) < limit.rows * depth
    return sum(lengths[one] for one in (*part, row)) <= limit.tokens * depth
