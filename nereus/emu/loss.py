"""What a training step minimises, as a value that travels to the workers: the policy's loss or the critic's.

A loss takes the forward's outputs for one micro-batch and returns its share of the global loss (divided by
global counts, so that summing over micro-batches and units is exact) and the sums it reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nereus.algorithms.aggregation import Aggregation, GlobalCounts, token_mean
from nereus.algorithms.entropy import entropy_loss
from nereus.algorithms.kl import KlKind, kl_loss
from nereus.algorithms.ppo import policy_loss, value_loss
from nereus.emu.batch import Scores, TrainBatch


class Loss(Protocol):
    """A differentiable function of the scores of one micro-batch."""

    @property
    def temperature(self) -> float:
        """The temperature at which log-probabilities are taken."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must return the entropy."""
        ...

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the loss (scalar), and detached shares by name that add up over the
        batch.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Clipped surrogate, minus an entropy bonus, plus a KL term to the reference policy."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    temperature: float = 1.0
    entropy: float = 0.0
    kl: float = 0.0
    kl_kind: KlKind = "k3"

    @property
    def needs_entropy(self) -> bool:
        """Only when the bonus has a weight."""
        return self.entropy > 0

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Loss`. Needs `old_logprobs_bt` and `advantages_bt`, and `reference_logprobs_bt` with a KL
        term.
        """
        assert scores.logprobs_bt is not None, "the policy's loss needs log-probabilities"
        assert batch.old_logprobs_bt is not None, "the policy's loss needs the old log-probabilities"
        assert batch.advantages_bt is not None, "the policy's loss needs advantages"
        loss, stats = policy_loss(
            scores.logprobs_bt,
            batch.old_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            counts=counts,
            aggregation=self.aggregation,
        )
        sums = stats.by_name()
        if scores.entropy_bt is not None:
            sums["entropy"] = token_mean(scores.entropy_bt, batch.mask_bt, counts)
            if self.entropy > 0:
                loss = loss + self.entropy * entropy_loss(
                    scores.entropy_bt, batch.mask_bt, counts=counts, aggregation=self.aggregation
                )
        if self.kl > 0:
            assert batch.reference_logprobs_bt is not None, (
                "a KL term needs the reference's log-probabilities"
            )
            term = kl_loss(
                scores.logprobs_bt,
                batch.reference_logprobs_bt,
                batch.mask_bt,
                kind=self.kl_kind,
                counts=counts,
                aggregation=self.aggregation,
            )
            loss = loss + self.kl * term
            sums["kl"] = term.detach()
        return loss, sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Clipped squared error of the critic."""

    clip: float | None
    aggregation: Aggregation
    temperature: float = 1.0

    @property
    def needs_entropy(self) -> bool:
        """A critic has none."""
        return False

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Loss`. Needs `old_values_bt` and `returns_bt`."""
        assert scores.values_bt is not None, "the critic's loss needs values"
        assert batch.old_values_bt is not None, "the critic's loss needs the old values"
        assert batch.returns_bt is not None, "the critic's loss needs returns"
        loss, stats = value_loss(
            scores.values_bt,
            batch.old_values_bt,
            batch.returns_bt,
            batch.mask_bt,
            clip=self.clip,
            counts=counts,
            aggregation=self.aggregation,
        )
        return loss, stats.by_name()
