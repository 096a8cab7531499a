"""How a mini-batch's rows are dealt to units and cut into micro-batches: balanced by tokens, little padding.

Pure. Every unit gets the same number of micro-batches, because the units' gradients are summed once for all;
where rows run out, a row stands in again with a zero mask, which adds nothing to loss, counts or gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from nereus.emu.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Indices of the rows of one micro-batch; the last `num_padding` of them are stand-ins with a zero
    mask.
    """

    rows: tuple[int, ...]
    num_padding: int = 0


def deal_rows(
    lengths: Sequence[int], *, num_units: int, micro_batch_rows: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of every unit. `lengths` are the rows' token counts.

    Rows go to units longest first and in turning order (0 1 2 2 1 0 ...), so that token sums are close; each
    unit's rows are then cut in order of length, so that a micro-batch holds rows of like length.
    """
    assert lengths, "a mini-batch has at least one row"
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    shares: list[list[int]] = [[] for _ in range(num_units)]
    for place, row in enumerate(by_length):
        turn, unit = divmod(place, num_units)
        shares[unit if turn % 2 == 0 else num_units - 1 - unit].append(row)
    num_micro = -(-max(map(len, shares)) // micro_batch_rows)
    return tuple(_cut(share, num_micro, stand_in=by_length[-1]) for share in shares)


def _cut(rows: list[int], num_micro: int, *, stand_in: int) -> tuple[MicroBatch, ...]:
    """`num_micro` consecutive parts whose sizes differ by at most one, empty ones filled by a stand-in."""
    edges = [len(rows) * i // num_micro for i in range(num_micro + 1)]
    parts = [tuple(rows[lo:hi]) for lo, hi in pairwise(edges)]
    return tuple(
        MicroBatch(rows=part) if part else MicroBatch(rows=(stand_in,), num_padding=1) for part in parts
    )


def cut_batch(batch: TrainBatch, micro: MicroBatch) -> TrainBatch:
    """The rows of one micro-batch, without columns that all of them pad; stand-ins get a zero mask."""
    part = batch.select(micro.rows)
    if micro.num_padding:
        keep_b = torch.arange(len(micro.rows)) < len(micro.rows) - micro.num_padding
        part = replace(part, mask_bt=part.mask_bt * keep_b[:, None])
    return part.trimmed()
