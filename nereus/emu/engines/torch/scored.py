"""A batch in micro-batches and their scores put together again: the frame of every engine's forward pass.

    batch --micro_batches--> (rows, packed) --engine--> Scores --put--> [k, b, t] --shared--> every rank

Every rank knows every micro-batch, so shapes need no messages. Rows are taken in order of length, so that a
micro-batch pads little; each result lands at its own row.

Letters: k kinds of scores, b rows of the batch, c rows of a micro-batch, t response positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.emu.batch import Scores, TokenBatch
from nereus.emu.decoder import Head
from nereus.emu.engines.torch.packing import WHOLE, Packed, pack
from nereus.emu.engines.torch.token_share import TokenShare
from nereus.emu.unit_groups import UnitGroups

Limit = tuple[int, int | None]
"""Rows of a micro-batch, and where they are given the tokens that it holds instead."""
Read = Literal["response", "last"]


class Scored:
    """The scores of a batch as far as they are known: log-probabilities, then entropy if asked; or values.

    With `read="last"` the one column is read at each row's last token.
    """

    def __init__(
        self, batch: TokenBatch, head: Head, device: torch.device, *, entropy: bool, read: Read = "response"
    ) -> None:
        num_kinds = 2 if entropy and head == "lm" else 1
        num_columns = batch.max_response if read == "response" else 1
        self._batch, self._head, self._entropy, self._read = batch, head, entropy, read
        self._kbt = torch.zeros(num_kinds, batch.num_rows, num_columns, device=device)

    def micro_batches(self, limit: Limit, share: TokenShare = WHOLE) -> Iterator[tuple[Tensor, Packed]]:
        """The rows of every micro-batch with its index arithmetic, longest first; none of an empty batch.

        Along ep and cp the rows and tokens are those of `share`; a rank without rows computes padding.
        """
        if self._batch.num_rows:
            for rows_c in by_length(self._batch, *limit):
                micro = self._batch.select(rows_c).trimmed()
                packed = pack(share.tokens(micro), self._read, share).to(self._kbt.device)
                yield rows_c[share.rows(micro)], packed

    def put(self, rows_c: Tensor, scores: Scores) -> None:
        """Keep the scores of these rows."""
        if not len(rows_c):
            return
        kinds = (scores.logprobs_bt, scores.entropy_bt, scores.values_bt)
        for kind, part_ct in enumerate(part_ct for part_ct in kinds if part_ct is not None):
            self._kbt[kind, rows_c.to(self._kbt.device), : part_ct.shape[1]] = part_ct

    def shared(self, groups: UnitGroups) -> Scores:
        """The whole, float32 on the CPU of every rank: the last stage tells the rest. Of every number all but
        one of the ranks along ep and cp have zero. Collective over the unit.
        """
        if groups.copies is not None and self._kbt.numel():
            dist.all_reduce(self._kbt, group=groups.copies)
        if groups.pp is not None and self._kbt.numel():
            dist.broadcast(self._kbt, group=groups.pp, group_src=groups.layout.pp - 1)
        kbt = self._kbt.cpu()
        if self._head == "value":
            return Scores(values_bt=kbt[0])
        return Scores(logprobs_bt=kbt[0], entropy_bt=kbt[1] if self._entropy else None)


def last_values(scores: Scores) -> Tensor:
    """The judgements of a reward model, float32 [b], from scores read at each row's last token."""
    assert scores.values_bt is not None, "a reward model has a value head"
    return scores.values_bt[:, 0]


def by_length(
    batch: TokenBatch, micro_batch_rows: int, micro_batch_tokens: int | None = None
) -> Iterator[Tensor]:
    """The rows of every micro-batch, longest first.

    With `micro_batch_tokens` it holds as many rows as do not exceed them when padded to the longest, and one
    at least.
    """
    lens_b = batch.prompt_lens_b + batch.response_lens_b
    order_b = torch.argsort(lens_b, descending=True, stable=True)
    if micro_batch_tokens is None:
        return iter(torch.split(order_b, micro_batch_rows))
    sizes, at, lens = [], 0, lens_b[order_b].tolist()
    while at < len(lens):
        sizes.append(min(len(lens) - at, max(1, micro_batch_tokens // max(1, lens[at]))))
        at += sizes[-1]
    return iter(torch.split(order_b, sizes))
