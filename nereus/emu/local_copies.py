"""What a rank copies from its old shard into its new one, as rows of the arenas.

The plan knows where a region lies in its tensor, the arena where the tensor lies, at one place for all kinds.
So a region is looked at once, not once a kind, and needs no view of its own. Regions that follow one another
on both sides are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from nereus.emu.arena import Arena, ShardState
from nereus.emu.far_copies import copy_far
from nereus.emu.rank_plan import LocalCopy, Region
from nereus.emu.staging import StagingPool
from nereus.kernels.regions import FlatPair, RowPair, copy_rows

Found = tuple[list[RowPair], list[LocalCopy], int]


def copy_local(copies: Sequence[LocalCopy], old: ShardState, new: ShardState, pool: StagingPool) -> int:
    """Give the packing lane all local copies of a chunk, which are of the same kinds; returns the bytes they
    write. What lies in host memory passes through buffers of the pool.
    """
    lane = pool.lanes.pack
    flats: list[FlatPair] = []
    far: list[FlatPair] = []
    views: list[tuple[Tensor, Tensor]] = []
    known: dict[tuple[int, int], Found] = {}
    num_bytes = 0
    for move in copies[0].moves if copies else ():
        source, target = old.arenas[move.source.name], new.arenas[move.target.name]
        shards = id(source.shard), id(target.shard)  # one for all kinds, unless units share an optimizer
        if shards not in known:
            known[shards] = _rows(copies, source, target)
        rows, others, num_elements = known[shards]
        (flats if source.device.type == target.device.type else far).append((source.flat, target.flat, rows))
        views += [(view_of(copy.source, source), view_of(copy.target, target)) for copy in others]
        num_bytes += move.target.num_bytes * num_elements
    if flats:
        lane.give(partial(copy_rows, flats))
    copy_far(far, pool)
    if views:
        lane.copy(views)
    return num_bytes


def view_of(region: Region, arena: Arena) -> Tensor:
    """The live view of a region."""
    view = arena.views[region.physical]
    shape = view.shape
    for dim, (lo, hi) in enumerate(region.stored):
        if hi - lo != shape[dim]:  # most are whole, and slicing costs as much as a small copy
            view = view.narrow(dim, lo, hi - lo)
    return view


def _rows(copies: Sequence[LocalCopy], source: Arena, target: Arena) -> Found:
    """Where copies are read and written, in elements of the two arenas; those that are no rows; and how many
    elements all of them have.
    """
    source_held, target_held = source.views, target.views
    out: list[RowPair] = []
    others: list[LocalCopy] = []
    num_elements = 0
    end = (-1, -1)  # of the last copy, where it is a single row
    for copy in copies:
        read, written = copy.source.physical, copy.target.physical
        assert read in source_held, f"{read} is read and not allocated"
        assert written in target_held, f"{written} is written and not allocated"
        a, b = copy.source.rows, copy.target.rows
        if a is None or b is None or (a.num != b.num and a.num > 1 and b.num > 1):
            others.append(copy)
            num_elements += copy.target.num_elements
            continue
        source_at, target_at = source.starts[read] + a.at, target.starts[written] + b.at
        num_elements += a.num * a.width
        if a.num == 1 and b.num == 1:
            width = a.width
            if (source_at, target_at) == end:
                source_at, target_at, _, before, _, _ = out.pop()
                width += before
            out.append((source_at, target_at, 1, width, width, width))
            end = source_at + width, target_at + width
            continue
        num, width = max((a.num, a.width), (b.num, b.width))
        strides = (a.stride if a.num > 1 else width), (b.stride if b.num > 1 else width)
        out.append((source_at, target_at, num, width, *strides))
        end = -1, -1
    return out, others, num_elements
