"""What a rank copies from a shard in its host's memory into one on its device.

    host, one run of memory ──carry──▶ buffer on the device ──rows──▶ arena

A link is fast for whole runs, so a run that holds strided rows is carried as it lies and the device takes the
rows out of it. Runs are cut, so a small buffer serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from nereus.emu.staging import StagingPool
from nereus.kernels.regions import FlatPair, RowPair, copy_rows

RUN_BYTES = 64 << 20
GAP = 4096  # elements that are carried for nothing rather than by a call of their own


def copy_far(flats: Sequence[FlatPair], pool: StagingPool, run_bytes: int = RUN_BYTES) -> None:
    """Give the pool's packing lane these copies; sources lie in host memory that does not change."""
    lane = pool.lanes.pack
    for source, target, rows in flats:
        for lo, hi, part in runs(rows, max(1, run_bytes // source.element_size())):
            buffer = pool.take((hi - lo) * source.element_size(), lane)
            near = buffer.view(source.dtype)
            lane.carry(source[lo:hi], near)
            lane.give(partial(copy_rows, [(near, target, part)]))
            pool.give(buffer, lane.mark())


def runs(rows: Iterable[RowPair], most: int) -> Iterator[tuple[int, int, list[RowPair]]]:
    """Runs [lo, hi) of at most so many source elements, and the rows in each, whose sources count from lo."""
    lo = hi = 0
    held: list[RowPair] = []
    for row in sorted(part for each in rows for part in _cut(each, most)):
        first, last = row[0], _end(row)
        if held and (first > hi + GAP or max(hi, last) - lo > most):
            yield lo, hi, held
            held = []
        if not held:
            lo = hi = first
        held.append((first - lo, *row[1:]))
        hi = max(hi, last)
    if held:
        yield lo, hi, held


def _end(row: RowPair) -> int:
    source_at, _, num, width, stride, _ = row
    return source_at + (num - 1) * stride + width


def _cut(row: RowPair, most: int) -> Iterator[RowPair]:
    """The row pair in parts whose sources span at most so many elements."""
    source_at, target_at, num, width, source_stride, target_stride = row
    if width > most:
        for line in range(num):
            for lo in range(0, width, most):
                size = min(most, width - lo)
                starts = source_at + line * source_stride + lo, target_at + line * target_stride + lo
                yield (*starts, 1, size, size, size)
        return
    step = 1 + (most - width) // max(1, source_stride)
    for line in range(0, num, step):
        count = min(step, num - line)
        starts = source_at + line * source_stride, target_at + line * target_stride
        yield (*starts, count, width, source_stride, target_stride)
