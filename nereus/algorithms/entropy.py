"""Entropy of the policy as a term of the loss.

Letters: b rows (responses), t response positions, v vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from nereus.algorithms.aggregation import Aggregation, GlobalCounts, aggregate


def entropy_of_logits(logits_btv: Tensor) -> Tensor:
    """Entropy in nats of the distribution at each position; [b, t]. Computed in float32."""
    logprobs_btv = logits_btv.float().log_softmax(dim=-1)
    return -(logprobs_btv.exp() * logprobs_btv).sum(dim=-1)


def entropy_loss(
    entropy_bt: Tensor, mask_bt: Tensor, *, counts: GlobalCounts, aggregation: Aggregation
) -> Tensor:
    """This share's part of minus the aggregated entropy, a scalar: added with a positive coefficient it
    explores.
    """
    return -aggregate(entropy_bt, mask_bt, counts=counts, aggregation=aggregation)
