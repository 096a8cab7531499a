"""Causal attention over rows whose tokens are divided over the ranks along cp (Liu et al. 2023).

Letters: n tokens of this rank, q query heads, k key-value heads, d head width.

A row is cut into 2 * cp parts; rank c has parts c and 2 * cp - 1 - c, so that all do the same work:

    cp = 2, a row of 8    rank 0: 0 1 . . . . 6 7      rank 1: . . 2 3 4 5 . .

Keys and values go round the ring, to the next rank at each of cp steps, while each rank attends over those it
has; the outputs are merged. Of another rank's tokens a row needs either the early part, for all of its
queries (an earlier rank's), or both parts, for its late queries (a later rank's): one unmasked call a row.
Backwards keys and values go round once more, and the gradients that they gather go with them, back home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.engines.torch.block_attention import attend, attend_backward, merge
from nereus.emu.engines.torch.clock import span

Parts = tuple[int, int]  # tokens of a row's early and late part on one rank


def parts_of(length: int, cp: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two intervals of a row of `length` tokens that a rank of cp has; either may be empty."""
    at = [length * i // (2 * cp) for i in range(2 * cp + 1)]
    late = 2 * cp - 1 - rank
    return (at[rank], at[rank + 1]), (at[late], at[late + 1])


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention: queries [q0, q1) of this rank over keys [k0, k1) of the source."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAttention:
    """Attention of the tokens of rank `here`, row after row, each row's early part before its late one.

    `parts[c][row]` are the tokens of a row on rank c. `width` is the longest row. A token that is in no row
    (`has_spare`: the last one, on a rank that has no other) attends to itself.
    """

    group: ProcessGroup | None
    here: int
    parts: tuple[tuple[Parts, ...], ...]
    width: int
    has_spare: bool = False

    def __call__(self, layer: int, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
        """Heads' outputs side by side, [n, q * d]. Collective over the ranks along cp."""
        out_nqd: Tensor = _Ring.apply(q_nqd, k_nkd, v_nkd, self)  # type: ignore[no-untyped-call]
        return out_nqd.flatten(start_dim=1)

    def to(self, device: torch.device) -> RingAttention:
        """The same; it holds no tensors."""
        return self

    @property
    def cp(self) -> int:
        """Ranks in the ring."""
        return len(self.parts)

    def num_tokens(self, rank: int) -> int:
        """Tokens of all rows on a rank."""
        return sum(early + late for early, late in self.parts[rank])

    def source(self, step: int) -> int:
        """The rank whose keys are here at a step."""
        return (self.here - step) % self.cp

    def calls(self, step: int) -> Iterator[_Call]:
        """The calls of a step, row by row."""
        source, q, k = self.source(step), 0, 0
        for mine, theirs in zip(self.parts[self.here], self.parts[source], strict=True):
            num_q, num_k = sum(mine), sum(theirs)
            queries, keys = slice(q, q + num_q), slice(k, k + num_k)
            if source < self.here:
                keys = slice(k, k + theirs[0])
            elif source > self.here:
                queries = slice(q + mine[0], q + num_q)
            if queries.stop > queries.start and keys.stop > keys.start:
                yield _Call(queries, keys, source == self.here)
            q, k = q + num_q, k + num_k


@dataclass(slots=True)
class _Passing:
    """A tensor on its way to the next rank, and the one that comes from the previous."""

    works: list[dist.Work]
    sent: Tensor
    came: Tensor

    @classmethod
    def begin(cls, ring: RingAttention, x: Tensor, num_rows: int) -> _Passing:
        """Send `x`; `num_rows` rows come. Returns while they are on their way."""
        assert ring.group is not None, "a ring of one passes nothing"
        x, came = x.contiguous(), x.new_empty(num_rows, *x.shape[1:])
        after, before = (ring.here + 1) % ring.cp, (ring.here - 1) % ring.cp
        operations = []
        if x.numel():
            operations.append(dist.P2POp(dist.isend, x, group=ring.group, group_peer=after))
        if came.numel():
            operations.append(dist.P2POp(dist.irecv, came, group=ring.group, group_peer=before))
        return cls(dist.batch_isend_irecv(operations) if operations else [], x, came)

    def end(self) -> Tensor:
        """What came."""
        with span("context_parallel"):
            for work in self.works:
                work.wait()
        return self.came


def _rows(ring: RingAttention, step: int) -> int:
    """Rows of keys that are here at a step."""
    return ring.num_tokens(ring.source(step))


def _forward(q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor, ring: RingAttention) -> tuple[Tensor, Tensor]:
    num = ring.num_tokens(ring.here)
    out_nqd = torch.zeros(q_nqd.shape, dtype=torch.float32, device=q_nqd.device)
    lse_nq = torch.full(q_nqd.shape[:2], float("-inf"), device=q_nqd.device)
    kv_n2kd = torch.stack((k_nkd, v_nkd), dim=1)[:num]
    for step in range(ring.cp):
        passing = None
        if step + 1 < ring.cp:
            passing = _Passing.begin(ring, kv_n2kd, _rows(ring, step + 1))
        for call in ring.calls(step):
            k_skd, v_skd = kv_n2kd[call.keys].unbind(1)
            block = attend(q_nqd[call.queries], k_skd, v_skd, causal=call.causal)
            if step:  # the first step gives every query a finite sum
                block = merge((out_nqd[call.queries], lse_nq[call.queries]), block)
            out_nqd[call.queries], lse_nq[call.queries] = block
        if passing is not None:
            kv_n2kd = passing.end()
    if ring.has_spare:
        group = q_nqd.shape[1] // v_nkd.shape[1]
        out_nqd[-1] = v_nkd[-1].repeat_interleave(group, dim=0)
    return out_nqd.to(q_nqd.dtype), lse_nq


def _backward(
    grad_nqd: Tensor, saved: tuple[Tensor, ...], ring: RingAttention
) -> tuple[Tensor, Tensor, Tensor]:
    q_nqd, k_nkd, v_nkd, out_nqd, lse_nq = saved
    num = ring.num_tokens(ring.here)
    grad_q_nqd = torch.zeros(q_nqd.shape, dtype=torch.float32, device=q_nqd.device)
    kv_n2kd = torch.stack((k_nkd, v_nkd), dim=1)[:num]
    gathered = torch.zeros(kv_n2kd.shape, dtype=torch.float32, device=q_nqd.device)
    for step in range(ring.cp):
        passing = None
        if step + 1 < ring.cp:
            passing = _Passing.begin(ring, kv_n2kd, _rows(ring, step + 1))
        for call in ring.calls(step):
            k_skd, v_skd = kv_n2kd[call.keys].unbind(1)
            rows = call.queries
            parts = attend_backward(
                grad_nqd[rows], q_nqd[rows], k_skd, v_skd, out_nqd[rows], lse_nq[rows], causal=call.causal
            )
            grad_q_nqd[rows] += parts[0]
            gathered[call.keys, 0] += parts[1]
            gathered[call.keys, 1] += parts[2]
        if passing is not None:
            kv_n2kd = passing.end()
        if ring.cp > 1:  # they follow their keys; after the last step they are home
            gathered = _Passing.begin(ring, gathered, _rows(ring, (step + 1) % ring.cp)).end()
    grad_k, grad_v = torch.zeros_like(k_nkd), torch.zeros_like(v_nkd)
    grad_k[:num], grad_v[:num] = gathered.to(k_nkd.dtype).unbind(1)
    if ring.has_spare:
        grad_v[-1] = grad_nqd[-1].reshape(v_nkd.shape[1], -1, v_nkd.shape[2]).sum(dim=1)
    return grad_q_nqd.to(q_nqd.dtype), grad_k, grad_v


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_nqd: Tensor, k_nkd: Tensor, v_nkd: Tensor, ring: RingAttention) -> Tensor:
        out_nqd, lse_nq = _forward(q_nqd, k_nkd, v_nkd, ring)
        ctx.save_for_backward(q_nqd, k_nkd, v_nkd, out_nqd, lse_nq)
        ctx.ring = ring
        return out_nqd

    @staticmethod
    def backward(ctx: Any, grad_nqd: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad_nqd.contiguous(), ctx.saved_tensors, ctx.ring), None
