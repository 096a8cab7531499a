"""Many strided regions into one contiguous bucket, and back, in one launch each; cast on the way.

A region is a view of at most two dimensions after merging (a box of a contiguous matrix), with contiguous
columns. A move between half and single precision rounds to nearest even, as torch does; both forms are
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nereus.kernels.dispatch import runs_triton
from nereus.kernels.language import INTERPRETED, jit, narrow, tl

TILE = 4096  # elements a program moves

Pairs = Sequence[tuple[Tensor, Tensor]]
# Where rows are read and written: first element of each side, rows, elements of a row, elements from the
# beginning of one row to the next on each side.
RowPair = tuple[int, int, int, int, int, int]
FlatPair = tuple[Tensor, Tensor, Sequence[RowPair]]  # flat source, flat target, and what to copy


def copy_regions(pairs: Pairs) -> None:
    """Copy every source into its target: pairs (source, target) of one shape, all targets on one device.

    On a GPU one launch for each pair of dtypes. Views with strided columns, and what comes from the host, go
    one by one; such host memory may not change before the device is done.
    """
    if not pairs:
        return
    if not runs_triton(pairs[0][1]):
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])
        return
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, ...]]] = {}
    for source, target in pairs:
        region = _region(source, target) if source.device == target.device else None
        if region is None:
            target.copy_(source, non_blocking=True)
        elif source.numel():
            groups.setdefault((source.dtype, target.dtype), []).append(region)
    for (source_dtype, target_dtype), regions in groups.items():
        _launch(regions, source_dtype, target_dtype, pairs[0][1].device)


def copy_rows(flats: Sequence[FlatPair]) -> None:
    """Copy rows between contiguous 1-D tensors of one device; source and target share no memory.

    On a CPU, where nothing is cast, as bytes by numpy: for a row of a few KB the call of a torch operator
    costs as much as its bytes.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for source, target, rows in flats:
        if source.dtype == target.dtype and source.device.type == "cpu" and not runs_triton(source):
            _copy_bytes(source, target, rows)
            continue
        pairs += [
            (
                source.as_strided((num, width), (source_stride, 1), source.storage_offset() + source_at),
                target.as_strided((num, width), (target_stride, 1), target.storage_offset() + target_at),
            )
            for source_at, target_at, num, width, source_stride, target_stride in rows
        ]
    copy_regions(pairs)


def _copy_bytes(source: Tensor, target: Tensor, rows: Sequence[RowPair]) -> None:
    size = source.element_size()
    read, written = source.view(torch.uint8).numpy(), target.view(torch.uint8).numpy()
    for source_at, target_at, num, width, source_stride, target_stride in rows:
        length, lo, at = width * size, source_at * size, target_at * size
        if num == 1:
            written[at : at + length] = read[lo : lo + length]
            continue
        row = np.dtype((np.void, length))  # one value, so that rows are copied without a call for each
        out = np.ndarray(num, row, written, at, target_stride * size)
        out[...] = np.ndarray(num, row, read, lo, source_stride * size)


def _region(source: Tensor, target: Tensor) -> tuple[int, ...] | None:
    """Addresses, rows, columns and the row strides of both; None where columns are not contiguous."""
    if source.is_contiguous() and target.is_contiguous():
        return source.data_ptr(), target.data_ptr(), 1, source.numel(), 0, 0
    if source.dim() != 2 or (source.shape[1] > 1 and (source.stride(1) != 1 or target.stride(1) != 1)):
        return None
    rows, columns = source.shape
    return source.data_ptr(), target.data_ptr(), rows, columns, source.stride(0), target.stride(0)


@jit
def _copy_kernel(
    table_ptr, tiles_ptr, source_like, target_like, INTERPRETED: tl.constexpr, TILE: tl.constexpr
) -> Any:
    region = tl.load(tiles_ptr + 2 * tl.program_id(0))
    tile = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    row = table_ptr + region * 6
    source = tl.load(row).to(tl.pointer_type(source_like.dtype.element_ty))
    target = tl.load(row + 1).to(tl.pointer_type(target_like.dtype.element_ty))
    rows, columns = tl.load(row + 2), tl.load(row + 3)
    source_stride, target_stride = tl.load(row + 4), tl.load(row + 5)
    at = tile * TILE + tl.arange(0, TILE)
    ok = at < rows * columns
    line = at // columns
    column = at - line * columns
    x = tl.load(source + line * source_stride + column, mask=ok, other=0.0)
    tl.store(
        target + line * target_stride + column, narrow(x, target_like.dtype.element_ty, INTERPRETED), mask=ok
    )


def _launch(
    regions: list[tuple[int, ...]], source_dtype: torch.dtype, target_dtype: torch.dtype, device: torch.device
) -> None:
    table = torch.tensor(regions, dtype=torch.int64)
    tiles_per_region = (table[:, 2] * table[:, 3] + TILE - 1) // TILE
    which = torch.repeat_interleave(torch.arange(len(regions)), tiles_per_region)
    first = torch.cumsum(tiles_per_region, 0) - tiles_per_region
    tiles = torch.stack((which, torch.arange(len(which)) - first[which]), dim=1)
    if device.type == "cuda":  # from pageable memory the host would wait for all work before
        table, tiles = table.pin_memory(), tiles.pin_memory()
    likes = (torch.empty(1, dtype=dtype, device=device) for dtype in (source_dtype, target_dtype))
    _copy_kernel[(len(tiles),)](
        table.to(device, non_blocking=True),
        tiles.to(device, non_blocking=True),
        *likes,
        INTERPRETED=INTERPRETED,
        TILE=TILE,
    )
