"""How per-token losses become one number: sums over a share, divided by counts of the whole batch.

Letters: b rows (responses) of this share, t response positions.

A share is whatever one `backward` sees: one micro-batch of one unit. `aggregate` divides by the counts of the
*global* batch, so the sum over micro-batches and units is the loss of the batch, and the SUM (not the mean)
over units of the gradients is its gradient, however the rows were cut. Dividing by local counts gives each
share the same weight whatever its length; on two equal shares with 1 and 999 tokens that counts the one token
999 times.

The modes carry verl's names and values (`core_algos.agg_loss`), with one difference:
`seq-mean-token-sum-norm` divides by the number of rows and by a constant length, as verl did when its
`loss_scale_factor` was the row width; the constant is `GlobalCounts.max_tokens` here, because a padded width
changes with the cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from nereus.kernels.whiten import masked_whiten

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Counts of the whole batch of one optimizer step, over all units and micro-batches.

    `num_rows` counts rows with at least one token that counts: zero-mask rows (padding to fill a unit, rows
    whose reward is missing) are not in it. `num_tokens` counts positions where the mask is set. `max_tokens`
    is the constant of `seq-mean-token-sum-norm`, usually the maximum response length. `num_averaged` is 1
    where gradients are summed over units; an engine that can only average over n units sets n, and the loss
    is scaled up by it.
    """

    num_rows: int
    num_tokens: int
    max_tokens: int = 1
    num_averaged: int = 1

    @classmethod
    def from_mask(cls, mask_bt: Tensor, *, max_tokens: int | None = None) -> GlobalCounts:
        """Count a mask of the whole batch; `max_tokens` defaults to its width."""
        set_bt = mask_bt.bool()
        return cls(
            num_rows=int(set_bt.any(dim=-1).sum()),
            num_tokens=int(set_bt.sum()),
            max_tokens=mask_bt.shape[-1] if max_tokens is None else max_tokens,
        )

    @classmethod
    def total(cls, parts: Iterable[GlobalCounts]) -> GlobalCounts:
        """Counts of a batch from those of its parts, which must agree on both constants."""
        counts = tuple(parts)
        constants = {(part.max_tokens, part.num_averaged) for part in counts}
        if len(constants) != 1:
            raise ValueError(
                f"cannot add counts with {len(constants)} different constants: {sorted(constants)}"
            )
        max_tokens, num_averaged = constants.pop()
        return cls(
            num_rows=sum(part.num_rows for part in counts),
            num_tokens=sum(part.num_tokens for part in counts),
            max_tokens=max_tokens,
            num_averaged=num_averaged,
        )


def aggregate(loss_bt: Tensor, mask_bt: Tensor, *, counts: GlobalCounts, aggregation: Aggregation) -> Tensor:
    """This share's part of the batch's loss, a scalar; parts add up.

    Positions outside the mask have no influence, NaN included. A share without any set position gives an
    exact 0 that still has a gradient (of zeros), so every rank can call `backward` the same number of times.
    """
    kept_bt = inside(loss_bt, mask_bt)
    match aggregation:
        case "token-mean":
            total = kept_bt.sum() / max(counts.num_tokens, 1)
        case "token-sum":
            total = kept_bt.sum()
        case "seq-mean-token-sum":
            total = kept_bt.sum() / max(counts.num_rows, 1)
        case "seq-mean-token-sum-norm":
            total = kept_bt.sum() / (max(counts.num_rows, 1) * counts.max_tokens)
        case "seq-mean-token-mean":
            lengths_b = mask_bt.bool().sum(dim=-1).clamp(min=1)
            total = (kept_bt.sum(dim=-1) / lengths_b).sum() / max(counts.num_rows, 1)
        case _:
            raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
    return total * counts.num_averaged


def inside(x_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """`x_bt` with exact zeros outside the mask, in value and in gradient.

    Applied to the *inputs* of a loss, not only to its result: a NaN that entered an `exp` comes back through
    the gradient as 0 * NaN even when the result was masked.
    """
    return x_bt.masked_fill(~mask_bt.bool(), 0.0)


def token_mean(x_bt: Tensor, mask_bt: Tensor, counts: GlobalCounts) -> Tensor:
    """This share's part of a statistic averaged over the batch's tokens; detached, parts add up."""
    return inside(x_bt.detach(), mask_bt).sum() / max(counts.num_tokens, 1)


def whiten(x_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over set positions, zero elsewhere; [b, t].

    Needs the whole batch, so it runs once at the driver and never per micro-batch. The variance is unbiased,
    as in verl's `masked_whiten`; verl leaves values at unset positions and raises below two tokens, where we
    return zeros: a step whose rewards are nearly all missing then teaches nothing instead of ending the job.
    """
    return masked_whiten(x_bt, mask_bt.bool())
