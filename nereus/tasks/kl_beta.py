"""The weight of the KL term: configured, or following the divergence. Pure; its state is the campaign's."""

from __future__ import annotations

from nereus.algorithms.kl import value_kind
from nereus.algorithms.kl_controller import adapted_beta, mean_kl
from nereus.config import CampaignConfig
from nereus.emu.batch import TrainBatch


def beta_after(config: CampaignConfig, beta: float | None, batch: TrainBatch) -> tuple[float, float] | None:
    """The divergence of a step's rows from the reference, and the weight for the next step.

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
    after = adapted_beta(
        kl.coefficient if beta is None else beta,
        found,
        target=kl.adaptive.target,
        horizon_rows=kl.adaptive.horizon_rows,
        num_rows=num_rows,
    )
    return found, after
