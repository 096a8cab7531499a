"""Streams and buckets: how the routes of a plan are dealt into the rounds of its exchange.

Routes of one path form a *stream*. A stream's regions are dealt in order into buckets; bucket k travels hop h
in turn k + h, so that a relay passes on each bucket while the next one arrives. All that decides buckets and
turns is computed from the plan alone, alike at every rank, so ends never negotiate.

Where a rank has more peers than a group call may have operations, streams are dealt into *waves*, each within
the cap, that run one after the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from nereus.emu.layout import Rank, Seat
from nereus.emu.multicast import shared_routes
from nereus.emu.partition import cell_rows
from nereus.emu.rank_plan import Mode
from nereus.emu.regions import Part, parts_of, rows_of
from nereus.emu.sources import Route

if TYPE_CHECKING:
    from nereus.emu.reshard import ReshardPlan

RELAY_BUCKETS = 8  # a chain fills its pipeline in an eighth of the transfer or less
MIN_RELAY_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Routes of one path, the wave they travel in, and the bytes of a bucket.

    With `shared` each bucket is broadcast by the first of the path to all others in one turn.
    """

    path: tuple[Rank, ...]
    routes: tuple[Route, ...]
    wave: int
    bucket_bytes: int
    shared: bool = False

    @property
    def num_relays(self) -> int:
        """Hops that a bucket waits for the one before."""
        return 0 if self.shared else len(self.path) - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """All streams, sorted by path, and what they have in common.

    `message_operations` is the share of the operation cap that one message may use; `fill_bytes` pass the
    longest chain before its last receiver gets its first bucket.
    """

    items: tuple[Stream, ...]
    by_rank: dict[Rank, tuple[int, ...]]
    message_operations: int
    num_rounds: int
    fill_bytes: int


def make_streams(plan: ReshardPlan) -> Streams:
    """Group the routes by path and share out the operation cap."""
    by_path: dict[tuple[tuple[Rank, ...], bool], list[Route]] = defaultdict(list)
    for route, shared in shared_routes(plan):
        by_path[route.path, shared].append(route)
    cap = plan.limits.operation_cap
    used: list[Counter[Rank]] = []
    items: list[Stream] = []
    for (path, shared), routes in sorted(by_path.items()):
        ends = Counter(path) if shared else Counter(rank for hop in pairwise(path) for rank in hop)
        fits = (all(taken[r] + n <= cap for r, n in ends.items()) for taken in used)
        wave = next((number for number, fit in enumerate(fits) if fit), len(used))
        if wave == len(used):
            used.append(Counter())
        used[wave].update(ends)
        size = sum(route.num_elements for route in routes) * plan.wire_bytes_per_element
        items.append(
            Stream(
                path=path,
                routes=tuple(routes),
                wave=wave,
                bucket_bytes=plan.limits.bucket_bytes if shared else _bucket_bytes(plan, path, size),
                shared=shared,
            )
        )
    busiest = max((n for taken in used for n in taken.values()), default=1)
    mine: dict[Rank, list[int]] = defaultdict(list)
    for index, stream in enumerate(items):
        for rank in stream.path:
            mine[rank].append(index)
    return Streams(
        items=tuple(items),
        by_rank={rank: tuple(indices) for rank, indices in mine.items()},
        message_operations=cap // busiest,
        num_rounds=_num_rounds(plan, items, len(used)),
        fill_bytes=max((s.bucket_bytes * s.num_relays for s in items), default=0),
    )


def _bucket_bytes(plan: ReshardPlan, path: tuple[Rank, ...], size: int) -> int:
    cap = plan.limits.bucket_bytes
    if len(path) == 2:
        return cap
    return min(cap, max(MIN_RELAY_BUCKET_BYTES, -(-size // (RELAY_BUCKETS * (len(path) - 2)))))


def _num_rounds(plan: ReshardPlan, items: list[Stream], num_waves: int) -> int:
    """About how many group calls the exchange takes: the longest stream of every wave."""
    longest = [0] * num_waves
    for stream in items:
        size = sum(route.num_elements for route in stream.routes) * plan.wire_bytes_per_element
        turns = -(-size // stream.bucket_bytes) + stream.num_relays
        longest[stream.wave] = max(longest[stream.wave], turns)
    return sum(longest)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one stream sends in one turn of one chunk."""

    chunk: int
    turn: int
    parts: tuple[Part, ...]


def buckets(plan: ReshardPlan, stream: Stream, seats: tuple[Seat, ...], mode: Mode) -> Iterator[Bucket]:
    """Deal the stream's parts into buckets by size alone, so that all hops agree."""
    by_chunk: dict[int, list[Part]] = defaultdict(list)
    for route in stream.routes:
        for part in parts_of(plan.partition, route.blocks, route.share, seats):
            by_chunk[chunk_of(plan, part, mode)].append(part)
    for chunk, parts in sorted(by_chunk.items()):
        for turn, bucket in enumerate(_deal(plan, stream, parts)):
            yield Bucket(chunk, turn, tuple(bucket))


def chunk_of(plan: ReshardPlan, part: Part, mode: Mode) -> int:
    """The chunk a part travels in: its place in bounded mode, one for all in shadow mode."""
    if mode == "shadow":
        return 0
    return plan.partition.classes[part.kind].chunk(part.instance, plan.model.num_layers)


def _deal(plan: ReshardPlan, stream: Stream, parts: Iterable[Part]) -> Iterator[list[Part]]:
    width, budget = plan.wire_bytes_per_element, plan.streams.message_operations
    bucket: list[Part] = []
    size, operations = 0, 1
    for part in _no_larger(parts, stream.bucket_bytes // width):
        elements = part.num_elements
        cost = sum(elements * move.wire_bytes >= plan.limits.direct_bytes for move in plan.moves)
        cost = cost if direct_allowed(plan) else 0
        if bucket and (size + elements * width > stream.bucket_bytes or operations + cost > budget):
            yield bucket
            bucket, size, operations = [], 0, 1
        bucket.append(part)
        size += elements * width
        operations += cost
    if bucket:
        yield bucket


def direct_allowed(plan: ReshardPlan) -> bool:
    """Whether a message may spend an operation on every kind of a region besides the packed one."""
    return plan.streams.message_operations > len(plan.moves)


def _no_larger(parts: Iterable[Part], limit: int) -> Iterator[Part]:
    """Cut parts above `limit` elements between rows; a single row is never cut."""
    for part in parts:
        if part.num_elements <= limit:
            yield part
            continue
        rows = cell_rows(part.box)
        step = max(1, limit * rows // part.num_elements)
        for lo in range(0, rows, step):
            box = rows_of(part.box, lo, min(rows, lo + step)) if rows > 1 else part.box
            yield Part(part.kind, part.instance, part.slot, box)
