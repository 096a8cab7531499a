"""Which part of a micro-batch a rank computes: rows are dealt along ep, and tokens of each row along cp.

    micro-batch ──rows e, e + ep, ... of those in order of length──▶ parts c and 2 cp - 1 - c of each row

Every rank of the unit has the whole micro-batch, so nothing is sent to divide it. A rank that is left without
rows computes one padding token, so that it takes part in every collective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nereus.emu.batch import Scores, TokenBatch, TrainBatch
from nereus.emu.unit_groups import UnitGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """This rank's coordinates along ep and cp, and the groups of both axes."""

    ep: int = 1
    expert: int = 0
    cp: int = 1
    part: int = 0
    ep_group: ProcessGroup | None = None
    cp_group: ProcessGroup | None = None

    @classmethod
    def of(cls, groups: UnitGroups) -> TokenShare:
        """The share of a rank of a unit."""
        layout, at = groups.layout, groups.position
        return cls(
            ep=layout.ep,
            expert=at.ep,
            cp=layout.cp,
            part=at.cp,
            ep_group=groups.ep,
            cp_group=groups.cp,
        )

    def rows(self, batch: TokenBatch) -> Tensor:
        """The rows of a micro-batch that this rank computes, in their order; int64, perhaps none."""
        if self.ep == 1:
            return torch.arange(batch.num_rows)
        lens_b = batch.prompt_lens_b + batch.response_lens_b
        order_b = torch.argsort(lens_b, descending=True, stable=True)
        return order_b[self.expert :: self.ep].sort().values

    def tokens(self, batch: TokenBatch) -> TokenBatch:
        """This rank's rows, or one of padding."""
        rows = self.rows(batch)
        return batch.select(rows).trimmed() if len(rows) else _padding(batch)

    def train(self, batch: TrainBatch) -> TrainBatch:
        """This rank's rows, or one of padding, which counts nowhere."""
        if self.ep == 1:
            return batch.trimmed()
        rows = self.rows(batch.batch)
        if len(rows):
            return batch.select(rows).trimmed()
        one = batch.select([0])
        return replace(one, batch=_padding(batch.batch), mask_bt=torch.zeros_like(one.mask_bt)).trimmed()

    def whole(self, scores: Scores) -> Scores:
        """Scores of whole rows from those of this rank's tokens. Collective along cp; the gradient of a
        token's score stays where the token is.
        """
        if self.cp_group is None:
            return scores
        group = self.cp_group
        return Scores(
            logprobs_bt=_summed(scores.logprobs_bt, group),
            entropy_bt=_summed(scores.entropy_bt, group),
            values_bt=_summed(scores.values_bt, group),
        )


def _padding(batch: TokenBatch) -> TokenBatch:
    none = torch.zeros_like(batch.prompt_lens_b[:1])
    return TokenBatch(tokens_bs=batch.tokens_bs[:1, :1], prompt_lens_b=none, response_lens_b=none)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _summed(x: Tensor | None, group: ProcessGroup) -> Tensor | None:
    return None if x is None else _Sum.apply(x, group)  # type: ignore[no-untyped-call]
