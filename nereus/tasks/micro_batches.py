"""How a mini-batch's rows are dealt to units and cut into micro-batches: by rows or by tokens, balanced.

Pure. Every unit gets the same number of micro-batches, because the units' gradients are summed once for all;
where rows run out, a row stands in again with a zero mask, which adds nothing to loss, counts or gradient.

    rows of 9 8 7 3 2 2 1 tokens, two units, at most 12 tokens:    unit 0   [9] [3 2 2]     unit 1   [8] [7 1]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from nereus.emu.batch import TrainBatch
from nereus.tasks.turning import in_turning_order

Parts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Indices of the rows of one micro-batch; the last `num_padding` of them are stand-ins with a zero
    mask.
    """

    rows: tuple[int, ...]
    num_padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest micro-batch: so many rows, or with `tokens` so many tokens whatever the rows.

    With `pads` the engine pads a micro-batch's rows to the longest, and padding counts. A row with more
    tokens than the limit is a micro-batch of its own.
    """

    rows: int
    tokens: int | None = None
    pads: bool = False


def planned_rows(limit: Limit, longest_tokens: int) -> int:
    """The rows of a planner's micro-batch that hold no more than the limit when all rows are the longest."""
    return limit.rows if limit.tokens is None else max(1, limit.tokens // longest_tokens)


def limit_under(limit: Limit, chosen_rows: int | None, longest_tokens: int) -> Limit:
    """The limit where a planner has chosen a number of rows, as `planned_rows` counts them; None: it has
    not.
    """
    if chosen_rows is None:
        return limit
    if limit.tokens is None or chosen_rows == planned_rows(limit, longest_tokens):
        return replace(limit, rows=chosen_rows)
    return replace(limit, rows=chosen_rows, tokens=chosen_rows * longest_tokens)


def deal_rows(lengths: Sequence[int], *, num_units: int, limit: Limit) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of every unit. `lengths` are the rows' token counts.

    By rows: they go to units longest first and in turning order (0 1 2 2 1 0 ...), so that token sums are
    close; each unit's rows are then cut in order of length, so that a micro-batch holds rows of like length.
    By tokens: each row, longest first, goes to the unit and there to the micro-batch with the fewest tokens;
    there are as few micro-batches as the limit allows, so all of them are about equally full.
    """
    assert lengths, "a mini-batch has at least one row"
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if limit.tokens is None:
        shares = in_turning_order(by_length, num_units)
        num_micro = -(-max(map(len, shares)) // limit.rows)
        cuts = [_cut(share, num_micro) for share in shares]
    else:
        shares = [list(share) for share in _lightest(by_length, lengths, num_units)]
        cuts = _by_tokens(shares, lengths, limit.tokens, _alike if limit.pads else _lightest)
    return tuple(tuple(_micro_batch(part, by_length[-1]) for part in parts) for parts in cuts)


def _cut(rows: Sequence[int], num_micro: int) -> Parts:
    """`num_micro` consecutive parts whose sizes differ by at most one."""
    edges = [len(rows) * i // num_micro for i in range(num_micro + 1)]
    return [tuple(rows[lo:hi]) for lo, hi in pairwise(edges)]


def _micro_batch(part: tuple[int, ...], stand_in: int) -> MicroBatch:
    return MicroBatch(rows=part) if part else MicroBatch(rows=(stand_in,), num_padding=1)


Cut = Callable[[Sequence[int], Sequence[int], int], Parts]


def _by_tokens(shares: Sequence[list[int]], lengths: Sequence[int], tokens: int, cut: Cut) -> list[Parts]:
    """Every unit's rows in the same number of parts, the smallest with which all fit."""
    most = max(sum(lengths[row] for row in share) for share in shares)
    num_micro = max(1, -(-most // tokens))
    size = _padded_tokens if cut is _alike else _real_tokens
    while True:
        cuts = [cut(share, lengths, num_micro) for share in shares]
        if all(len(part) <= 1 or size(part, lengths) <= tokens for parts in cuts for part in parts):
            return cuts
        num_micro += 1


def _real_tokens(part: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in part)


def _padded_tokens(part: Sequence[int], lengths: Sequence[int]) -> int:
    return len(part) * max(lengths[row] for row in part)


def _lightest(by_length: Sequence[int], lengths: Sequence[int], num: int) -> Parts:
    """Each row, longest first, to the part with the fewest tokens so far (Graham 1969)."""
    parts: list[list[int]] = [[] for _ in range(num)]
    heap = [(0, part) for part in range(num)]
    for row in by_length:
        tokens, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (tokens + lengths[row], part))
    return [tuple(part) for part in parts]


def _alike(by_length: Sequence[int], lengths: Sequence[int], num: int) -> Parts:
    """Consecutive parts, `num` of them: the largest padded one is halved until there are so many."""
    parts: Parts = [tuple(by_length)]
    while len(parts) < num:
        index = max(
            range(len(parts)),
            key=lambda i: (len(parts[i]) > 1, _padded_tokens(parts[i], lengths) if parts[i] else 0),
        )
        part = parts[index]
        at = _fair_cut(part, lengths)
        parts[index : index + 1] = [part[:at], part[at:]]
    return parts


def _fair_cut(part: Sequence[int], lengths: Sequence[int]) -> int:
    """Where to cut rows in order of length so that the larger padded half is smallest."""
    if len(part) < 2:
        return len(part)
    return min(
        range(1, len(part)),
        key=lambda at: max(at * lengths[part[0]], (len(part) - at) * lengths[part[at]]),
    )


def cut_batch(batch: TrainBatch, micro: MicroBatch) -> TrainBatch:
    """The rows of one micro-batch, without columns that all of them pad; stand-ins get a zero mask."""
    part = batch.select(micro.rows)
    if micro.num_padding:
        keep_b = torch.arange(len(micro.rows)) < len(micro.rows) - micro.num_padding
        part = replace(part, mask_bt=part.mask_bt * keep_b[:, None])
    return part.trimmed()
