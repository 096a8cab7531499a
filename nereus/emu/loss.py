"""What a training step minimises, as a value that travels to the workers: the policy's loss or the critic's.

A loss takes the forward's outputs for one micro-batch and returns its share of the global loss (divided by
global counts, so that summing over micro-batches and units is exact) and the sums it reports.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
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
        """The micro-batch's share of the loss (scalar), and detached sums by name that add up over the
        batch.
        """
        ...
