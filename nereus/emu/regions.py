"""From blocks to regions: the boxes that travel along a route, and where each end stores them.

Geometry is found once on the exemplar of a class and renamed for every instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from nereus.emu.layout import Seat
from nereus.emu.partition import Block, Cell, Partition, cell_rows, exemplar_shard, pieces_at
from nereus.emu.rank_plan import Region, Rows, Side
from nereus.emu.tensor import Box, ModelSpec, box_size


@dataclass(frozen=True, slots=True)
class Part:
    """A box of tensor `slot` of one instance of a class."""

    kind: int
    instance: int
    slot: int
    box: Box

    @property
    def num_elements(self) -> int:
        """Elements of the part."""
        return box_size(self.box)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a seat stores a box of the exemplar: `piece` numbers the piece of the tensor that contains it."""

    piece: int
    physical: str
    box: Box
    rows: Rows | None


@lru_cache(maxsize=1024)
def _shapes(exemplar: ModelSpec, seat: Seat) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in exemplar_shard(exemplar, seat).tensors}


def stored_rows(box: Box, shape: tuple[int, ...]) -> Rows | None:
    """A box of a row-major tensor as runs of memory; None where they lie in more than one stride."""
    at, step = 0, 1
    runs: list[tuple[int, int]] = []  # (number, stride) of what cannot be joined, from the innermost
    for (lo, hi), size in zip(reversed(box), reversed(shape), strict=True):
        at += lo * step
        if hi - lo > 1:
            if runs and runs[-1][0] * runs[-1][1] == step:
                runs[-1] = (runs[-1][0] * (hi - lo), runs[-1][1])
            else:
                runs.append((hi - lo, step))
        step *= size
    if not runs or runs[0][1] != 1:
        runs.insert(0, (1, 1))
    if len(runs) > 2:
        return None
    width = runs[0][0]
    num, stride = runs[1] if len(runs) == 2 else (1, width)
    return Rows(at=at, num=num, width=width, stride=stride)


@lru_cache(maxsize=65536)
def stored_at(exemplar: ModelSpec, name: str, box: Box, seat: Seat) -> Stored:
    """Where a seat stores a box that it holds entirely within one piece."""
    for number, piece in enumerate(pieces_at(exemplar, seat).get(name, ())):
        if all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(piece.box, box, strict=True)):
            inner = tuple(
                (start + lo - a, start + hi - a)
                for (start, _), (a, _), (lo, hi) in zip(piece.stored, piece.box, box, strict=True)
            )
            shape = _shapes(exemplar, seat)[piece.physical]
            return Stored(number, piece.physical, inner, stored_rows(inner, shape))
    raise AssertionError(f"I8: {name}{list(box)} is no part of a piece at {seat}")


def region_of(part: Partition, piece: Part, seat: Seat, side: Side) -> Region:
    """The region as the end at `seat` sees it."""
    kind = (part.sources if side == "old" else part.classes)[piece.kind]
    name = kind.exemplar.tensors[piece.slot].name
    stored = stored_at(kind.exemplar, name, piece.box, seat)
    return Region(
        logical=kind.names[piece.instance][piece.slot],
        box=piece.box,
        side=side,
        physical=kind.physical[piece.instance][stored.physical],
        stored=stored.box,
        rows=stored.rows,
    )


def parts_of(
    part: Partition, blocks: Sequence[int], share: tuple[int, int] | None, seats: tuple[Seat, ...]
) -> Iterator[Part]:
    """The parts of a share [lo, hi) of blocks laid end to end, joined where every seat stores them as one.

    The first seat is one of the old units, the others are of the new ones.
    `share` must start and end where `Block.snap` allows; None takes the blocks whole.
    """
    start = 0
    for number in blocks:
        block = part.blocks[number]
        size = int(part.num_elements[number])
        lo, hi = (0, size) if share is None else (max(0, share[0] - start), min(size, share[1] - start))
        if lo < hi:
            yield from _block_parts(part, block, lo, hi, seats)
        start += size


def _block_parts(part: Partition, block: Block, lo: int, hi: int, seats: tuple[Seat, ...]) -> Iterator[Part]:
    exemplars = part.sources[block.kind].exemplar, part.classes[block.kind].exemplar
    each = sum(box_size(cell.box) for cell in block.cells)
    for index, instance in enumerate(block.instances):
        a, b = max(0, lo - index * each), min(each, hi - index * each)
        if a >= b:
            continue
        cells = block.cells if b - a == each else _clip(block.cells, a, b)
        for cell in _joined(exemplars, cells, seats):
            yield Part(block.kind, instance, cell.slot, cell.box)


def _clip(cells: tuple[Cell, ...], lo: int, hi: int) -> tuple[Cell, ...]:
    """The rows of cells laid end to end between elements lo and hi, which lie between rows."""
    out: list[Cell] = []
    start = 0
    for cell in cells:
        size = box_size(cell.box)
        row = size // cell_rows(cell.box)
        a, b = max(0, lo - start) // row, min(size, hi - start) // row
        if a < b:
            out.append(Cell(cell.slot, rows_of(cell.box, a, b)))
        start += size
    return tuple(out)


def rows_of(box: Box, lo: int, hi: int) -> Box:
    """Rows [lo, hi) of a box, counted along its first dimension of more than one."""
    at = next((dim for dim, (a, b) in enumerate(box) if b - a > 1), None)
    return tuple((a + lo, a + hi) if dim == at else (a, b) for dim, (a, b) in enumerate(box))


@lru_cache(maxsize=4096)
def _joined(
    exemplars: tuple[ModelSpec, ModelSpec], cells: tuple[Cell, ...], seats: tuple[Seat, ...]
) -> tuple[Cell, ...]:
    """Neighbouring cells joined along one dimension where each seat stores both in one piece."""
    old, new = exemplars
    out: list[Cell] = []
    for slot, group in groupby(cells, key=lambda cell: cell.slot):
        name = new.tensors[slot].name
        last: Cell | None = None
        pieces: list[int] = []
        for cell in group:
            mine = [
                stored_at(new if place else old, name, cell.box, seat).piece
                for place, seat in enumerate(seats)
            ]
            union = _union(last.box, cell.box) if last is not None and mine == pieces else None
            if union is not None:
                out[-1] = last = Cell(slot, union)
            else:
                out.append(cell)
                last, pieces = cell, mine
    return tuple(out)


def _union(a: Box, b: Box) -> Box | None:
    """The box of two boxes that meet along exactly one dimension, else None."""
    differ = [dim for dim, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(differ) != 1 or a[differ[0]][1] != b[differ[0]][0]:
        return None
    at = differ[0]
    return tuple((x[0], b[dim][1]) if dim == at else x for dim, x in enumerate(a))
