"""The algorithms: each by its kind, with the defaults of its paper, and settings that would do nothing
refused.
"""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from nereus.config import CampaignConfig, CorrectionConfig, KlConfig
from nereus.config.algorithm import Aggregation

KINDS = ("grpo", "ppo", "remax", "rloo", "reinforce_pp", "dapo", "dr_grpo", "gspo", "cispo")


def campaign(algorithm: dict[str, object], *, samples: int = 4) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused"},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": algorithm,
            "batch": {"samples": samples},
        }
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_alone_is_a_whole_algorithm(kind: str) -> None:
    assert campaign({"kind": kind}).algorithm.kind == kind


def test_defaults_are_those_of_the_papers() -> None:
    dapo = campaign({"kind": "dapo"}).algorithm
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, Aggregation.token_mean)
    assert campaign({"kind": "dr_grpo"}).algorithm.aggregation == Aggregation.seq_mean_token_sum_norm
    gspo = campaign({"kind": "gspo"}).algorithm
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert gspo.aggregation == Aggregation.seq_mean_token_mean
    assert campaign({"kind": "cispo"}).algorithm.clip_low == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_is_refused_where_samples_are_compared(kind: str) -> None:
    if kind in ("ppo", "remax", "reinforce_pp"):
        assert campaign({"kind": kind}, samples=1).batch.samples == 1
    else:
        with pytest.raises(ValidationError, match="compares the samples of a prompt"):
            campaign({"kind": kind}, samples=1)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"where": "loss", "estimator": "k1"}, "zero expected gradient"),
        ({"where": "reward", "estimator": "k3-unbiased"}, "a reward has none"),
        ({"where": "reward", "estimator": "k3+"}, "a reward has none"),
        ({"coefficient": 0, "adaptive": {}}, "stays 0"),
    ],
)
def test_a_kl_term_that_would_do_nothing_is_refused(values: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        KlConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"weight": "none"}, "corrects nothing"),
        ({"beyond": "drop", "high": None}, "needs a bound"),
        ({"low": 3.0}, "exceeds high"),
        ({"rejection": {"measure": "k2", "low": 0.5}}, "leave low out"),
        ({"rejection": {"low": 3.0}}, "everything would be dropped"),
        ({"rejection": {"level": "sequence-max"}}, "measure k2 or k3"),
    ],
)
def test_a_correction_that_would_do_nothing_is_refused(values: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        CorrectionConfig.model_validate(values)


def test_a_discount_of_whole_responses_is_refused() -> None:
    with pytest.raises(ValidationError, match="discounts"):
        campaign({"kind": "reinforce_pp", "group_baseline": True, "gamma": 0.9})


def test_another_kinds_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="dual_clip"):
        campaign({"kind": "gspo", "dual_clip": 3.0})


def test_the_whole_survives_json() -> None:
    config = campaign(
        {
            "kind": "dapo",
            "kl": {"where": "loss", "estimator": "k3-unbiased", "adaptive": {"target": 0.05}},
            "correction": {"weight": "sequence", "rejection": {"low": 0.5}},
        }
    )
    assert TypeAdapter(CampaignConfig).validate_json(config.model_dump_json()) == config
