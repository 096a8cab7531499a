"""The KL term's weight: constant, or following the divergence from step to step."""

from __future__ import annotations

import pytest
import torch

from nereus.config import CampaignConfig
from nereus.emu.batch import TokenBatch, TrainBatch
from nereus.tasks.kl_beta import beta_after

BATCH = TrainBatch(
    batch=TokenBatch(
        tokens_bs=torch.ones(2, 3, dtype=torch.long),
        prompt_lens_b=torch.ones(2, dtype=torch.long),
        response_lens_b=torch.tensor([2, 1]),
    ),
    mask_bt=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    old_logprobs_bt=torch.tensor([[-1.0, -1.0], [-1.0, 0.0]]),
    reference_logprobs_bt=torch.tensor([[-1.2, -1.4], [-1.1, 0.0]]),
)


def config(kl: dict[str, object] | None) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused"},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": {"kind": "rloo", "kl": kl},
        }
    )


def test_a_constant_weight_and_no_term_have_no_state() -> None:
    assert beta_after(config(None), None, BATCH) is None
    assert beta_after(config({"coefficient": 0.1}), None, BATCH) is None


def test_the_first_weight_is_the_configured_one_and_the_next_follows_the_rows() -> None:
    adaptive = {"target": 0.1, "horizon_rows": 20}
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.5, "adaptive": adaptive}
    first = beta_after(config(kl), None, BATCH)
    assert first is not None
    assert (first.was, first.divergence) == pytest.approx((0.5, (0.3 + 0.1) / 2))
    assert first.beta == pytest.approx(0.5 * (1 + 0.2 * 2 / 20))  # the error is clipped to a fifth
    second = beta_after(config(kl), first.beta, BATCH)
    assert second is not None
    assert second.was == first.beta
    assert second.by_name() == {"kl_beta": first.beta, "kl_reference": pytest.approx(0.2)}
