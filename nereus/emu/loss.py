"""What a training step minimises, as a value that travels to the workers: the policy's loss or the critic's.

A loss takes the forward's outputs for one micro-batch and returns its share of the global loss (divided by
global counts, so that summing over micro-batches and units is exact) and the sums it reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nereus.algorithms.aggregation import Aggregation, GlobalCounts, token_mean
from nereus.algorithms.correction import Correction
from nereus.algorithms.entropy import entropy_loss
from nereus.algorithms.kl import KlLossKind, kl_loss
from nereus.algorithms.ppo import value_loss
from nereus.algorithms.surrogate import Surrogate, policy_loss
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
class ScaledLoss:
    """A loss times `scale`; what it reports is not scaled."""

    loss: Loss
    scale: float

    @property
    def temperature(self) -> float:
        """That of the loss."""
        return self.loss.temperature

    @property
    def needs_entropy(self) -> bool:
        """As the loss does."""
        return self.loss.needs_entropy

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Loss`."""
        share, parts = self.loss(scores, batch, counts)
        return share * self.scale, parts


def scale_of(loss: Loss) -> float:
    """By how much its gradients come out too large."""
    return loss.scale if isinstance(loss, ScaledLoss) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A surrogate, weighted where another policy drew the samples, minus an entropy bonus, plus a KL term to
    the reference policy.

    A batch that carries the behaviour policy's log-probabilities is weighted by `correction`; its old ones
    are then those of the proximal policy.
    """

    surrogate: Surrogate
    aggregation: Aggregation
    temperature: float = 1.0
    entropy: float = 0.0
    kl: float = 0.0
    kl_kind: KlLossKind = "k3"
    correction: Correction | None = None

    @property
    def needs_entropy(self) -> bool:
        """Only when the bonus has a weight."""
        return self.entropy > 0

    def __call__(
        self, scores: Scores, batch: TrainBatch, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Loss`. Needs `old_logprobs_bt` and `advantages_bt`, `reference_logprobs_bt` with a KL term,
        and a correction with `behaviour_logprobs_bt`.
        """
        assert scores.logprobs_bt is not None, "the policy's loss needs log-probabilities"
        assert batch.old_logprobs_bt is not None, "the policy's loss needs the old log-probabilities"
        assert batch.advantages_bt is not None, "the policy's loss needs advantages"
        weights_bt = self._weights(scores.logprobs_bt, batch)
        loss, stats = policy_loss(
            self.surrogate,
            scores.logprobs_bt,
            batch.old_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
            counts=counts,
            aggregation=self.aggregation,
            weights_bt=weights_bt,
        )
        sums = stats.by_name()
        if weights_bt is not None:
            sums["correction_weight"] = token_mean(weights_bt, batch.mask_bt, counts)
            sums["correction_dropped"] = token_mean((weights_bt == 0).float(), batch.mask_bt, counts)
        if scores.entropy_bt is not None:
            sums["entropy"] = token_mean(scores.entropy_bt, batch.mask_bt, counts)
            if self.entropy > 0:
                loss = loss + self.entropy * entropy_loss(
                    scores.entropy_bt, batch.mask_bt, counts=counts, aggregation=self.aggregation
                )
        if self.kl > 0:
            term = self._kl(scores.logprobs_bt, batch, counts)
            loss = loss + self.kl * term
            sums["kl"] = term.detach()
        return loss, sums

    def _weights(self, logprobs_bt: Tensor, batch: TrainBatch) -> Tensor | None:
        if batch.behaviour_logprobs_bt is None:
            return None
        assert self.correction is not None, "samples of a behaviour policy need a correction"
        assert batch.old_logprobs_bt is not None, "a correction needs the proximal log-probabilities"
        assert batch.advantages_bt is not None, "a correction needs advantages"
        return self.correction.weights(
            logprobs_bt,
            batch.old_logprobs_bt,
            batch.behaviour_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
        )

    def _kl(self, logprobs_bt: Tensor, batch: TrainBatch, counts: GlobalCounts) -> Tensor:
        assert batch.reference_logprobs_bt is not None, "a KL term needs the reference's log-probabilities"
        return kl_loss(
            logprobs_bt,
            batch.reference_logprobs_bt,
            batch.mask_bt,
            kind=self.kl_kind,
            counts=counts,
            aggregation=self.aggregation,
            old_logprobs_bt=batch.old_logprobs_bt,
        )


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
