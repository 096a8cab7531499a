"""The weight of the KL term: configured, or following the divergence. Pure; its state is the campaign's."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.algorithms.kl import value_kind
from nereus.algorithms.kl_controller import adapted_beta, mean_kl
from nereus.config import CampaignConfig
from nereus.emu.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedBeta:
    """The divergence of a step's rows from the reference, its weight in that step, and in the next."""

    divergence: float
    was: float
    beta: float

    def by_name(self) -> dict[str, float]:
        """The step's numbers under the names of the metrics."""
        return {"kl_beta": self.was, "kl_reference": self.divergence}


def beta_after(config: CampaignConfig, beta: float | None, batch: TrainBatch) -> AdaptedBeta | None:
    """The weight for the next step.

    `beta` is this step's weight, None before the first. None without a KL term that adapts. The divergence is
    that of the policy before the update.
    """
    kl = config.algorithm.kl
    if kl is None or kl.adaptive is None:
        return None
    assert batch.old_logprobs_bt is not None, "a divergence needs the policy's log-probabilities"
    assert batch.reference_logprobs_bt is not None, "a divergence needs the reference's log-probabilities"
    kind = value_kind(kl.estimator.value)
    found = mean_kl(batch.old_logprobs_bt, batch.reference_logprobs_bt, batch.mask_bt, kind)
    num_rows = int(batch.mask_bt.bool().any(dim=-1).sum())
    was = kl.coefficient if beta is None else beta
    after = adapted_beta(
        was,
        found,
        target=kl.adaptive.target,
        horizon_rows=kl.adaptive.horizon_rows,
        num_rows=num_rows,
    )
    return AdaptedBeta(divergence=found, was=was, beta=after)
