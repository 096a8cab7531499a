"""Scoring: forward passes over all rows in micro-batches, down the pipeline, and the result to every rank.

    stage 0 --x_nh--> stage 1 --x_nh--> ... --> last stage --broadcast [k, b, t]--> every stage

Every rank knows every micro-batch, so shapes need no messages. Rows are taken in order of length, so that a
micro-batch pads little; each result lands at its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.batch import Scores, TokenBatch
from nereus.emu.decoder import Head
from nereus.emu.engines.torch.forward import Stage, scores_of, through_stage
from nereus.emu.engines.torch.packing import pack
from nereus.emu.unit_groups import UnitGroups


def told(kbt: Tensor, head: Head, *, entropy: bool) -> Scores:
    """What `score` returns, by name: values for a value head, else log-probabilities and entropy if asked."""
    if head == "value":
        return Scores(values_bt=kbt[0])
    return Scores(logprobs_bt=kbt[0], entropy_bt=kbt[1] if entropy else None)


def score(
    stage: Stage,
    groups: UnitGroups,
    batch: TokenBatch,
    *,
    micro_batch_rows: int,
    micro_batch_tokens: int | None = None,
    temperature: float,
    entropy: bool,
    read: Literal["response", "last"] = "response",
) -> Tensor:
    """Float32 [k, b, t] on the CPU of every rank: log-probabilities, then entropy if asked; or values.

    Collective over the unit. With `read="last"` the one column is read at each row's last token.
    """
    is_value = stage.weights.config.head == "value"
    num_kinds = 1 if is_value or not entropy else 2
    num_columns = batch.max_response if read == "response" else 1
    device = stage.table.device
    out_kbt = torch.zeros(num_kinds, batch.num_rows, num_columns, device=device)
    if batch.num_rows == 0:
        return out_kbt.cpu()
    pipe = Pipe(groups)
    with torch.no_grad():
        for rows_c in by_length(batch, micro_batch_rows, micro_batch_tokens):
            packed = pack(batch.select(rows_c).trimmed(), read).to(device)
            x_nh = pipe.receive(packed.num_tokens, stage)
            x_nh = through_stage(stage, packed, x_nh)
            if not stage.is_last:
                pipe.send(x_nh)
                continue
            scores = scores_of(stage, packed, x_nh, temperature=temperature, entropy=entropy)
            for kind, part_ct in enumerate(present(scores)):
                out_kbt[kind, rows_c.to(device), : part_ct.shape[1]] = part_ct
        pipe.finish()
        if groups.pp is not None:
            dist.broadcast(out_kbt, group=groups.pp, group_src=groups.layout.pp - 1)
    return out_kbt.cpu()


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


def present(scores: Scores) -> list[Tensor]:
    """The kinds of scores that are there, in the order of the result."""
    kinds = (scores.logprobs_bt, scores.entropy_bt, scores.values_bt)
    return [kind for kind in kinds if kind is not None]


class Pipe:
    """This rank's ends of the pipeline: receive from the stage before, send to the one after."""

    def __init__(self, groups: UnitGroups) -> None:
        self._group: ProcessGroup | None = groups.pp
        self._stage = groups.position.pp
        self._pending: list[tuple[dist.Work, Tensor]] = []  # the tensor lives until it was sent

    def receive(self, num_tokens: int, stage: Stage) -> Tensor | None:
        """Hidden states [n, h] of the stage before; None on the first stage."""
        if self._group is None or self._stage == 0:
            return None
        x_nh = torch.empty(
            num_tokens, stage.weights.config.hidden_size, dtype=stage.table.dtype, device=stage.table.device
        )
        dist.recv(x_nh, group=self._group, group_src=self._stage - 1)
        return x_nh

    def send(self, x_nh: Tensor) -> None:
        """Hand hidden states to the stage after; returns while they are on their way."""
        self._wait(keep=1)  # one micro-batch in flight overlaps with the next one's computation
        work = dist.isend(x_nh, group=self._group, group_dst=self._stage + 1)
        assert work is not None, "a member of the group always gets a handle"
        self._pending.append((work, x_nh))

    def finish(self) -> None:
        """Wait until everything was received."""
        self._wait(keep=0)

    def _wait(self, keep: int) -> None:
        while len(self._pending) > keep:
            self._pending.pop(0)[0].wait()
