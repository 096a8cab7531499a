"""From scores to advantages: the right rows, the right masks, missing rewards without influence."""

from __future__ import annotations

import math

import pytest
import torch

from nereus.config import CampaignConfig
from nereus.emu.batch import Rollouts, TokenBatch
from nereus.tasks.estimate import estimate

NAN = float("nan")


def config(algorithm: dict[str, object], *, prompts: int, samples: int) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused"},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": algorithm,
            "batch": {"prompts": prompts, "samples": samples},
        }
    )


def rollouts(lengths: list[int]) -> Rollouts:
    rows, width = len(lengths), max(lengths)
    lens_b = torch.tensor(lengths)
    return Rollouts(
        batch=TokenBatch(
            tokens_bs=torch.ones(rows, width + 1, dtype=torch.long),
            prompt_lens_b=torch.ones(rows, dtype=torch.long),
            response_lens_b=lens_b,
        ),
        logprobs_bt=torch.where(torch.arange(width) < lens_b[:, None], -0.5, 0.0),
        stopped_b=torch.ones(rows, dtype=torch.bool),
        sample_ids_b=torch.arange(rows),
        version=0,
    )


def test_grpo_compares_the_samples_of_each_prompt() -> None:
    batch = estimate(
        config({"kind": "grpo"}, prompts=2, samples=2),
        rollouts([2, 3, 1, 1]),
        torch.tensor([1.0, 0.0, 5.0, 5.0]),
        None,
        None,
    )
    advantages_bt = batch.advantages_bt
    assert advantages_bt is not None
    # two rewards: mean .5, standard deviation with ddof 1 is sqrt(.5)
    assert advantages_bt[0, 0].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), abs=1e-6)
    assert advantages_bt[1].tolist() == pytest.approx([-0.7071058] * 3, abs=1e-6)
    assert not advantages_bt[2:].any()


def test_a_missing_reward_clears_its_row_and_leaves_the_others_baseline() -> None:
    batch = estimate(
        config({"kind": "grpo", "normalize_std": False}, prompts=1, samples=4),
        rollouts([2, 2, 2, 2]),
        torch.tensor([1.0, NAN, 0.0, NAN]),
        None,
        None,
    )
    assert batch.advantages_bt is not None
    assert batch.advantages_bt[:, 0].tolist() == [0.5, 0.0, -0.5, 0.0]
    assert batch.mask_bt.sum(dim=1).tolist() == [2.0, 0.0, 2.0, 0.0]
    assert not batch.advantages_bt.isnan().any()


def test_remax_takes_the_greedy_row_as_baseline_and_does_not_train_on_it() -> None:
    batch = estimate(
        config({"kind": "remax"}, prompts=2, samples=2),
        rollouts([2, 2, 2, 2, 4, 4]),
        torch.tensor([1.0, 0.0, 1.0, 0.5, 0.25, NAN]),
        None,
        None,
    )
    assert batch.batch.num_rows == 4
    assert batch.advantages_bt is not None
    assert batch.advantages_bt.shape == (4, 2)
    assert batch.advantages_bt[:2].tolist() == [[0.75, 0.75], [-0.25, -0.25]]
    assert not batch.mask_bt[2:].any()  # their baseline is missing


def test_ppo_whitens_advantages_over_the_batch_and_keeps_the_returns() -> None:
    batch = estimate(
        config({"kind": "ppo"}, prompts=2, samples=1),
        rollouts([3, 1]),
        torch.tensor([1.0, 0.0]),
        None,
        torch.zeros(2, 3),
    )
    assert batch.advantages_bt is not None
    assert batch.returns_bt is not None
    assert batch.returns_bt.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    kept = batch.advantages_bt[batch.mask_bt.bool()]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert kept.std().item() == pytest.approx(1.0, abs=1e-4)


def test_kl_in_the_reward_is_subtracted_token_by_token() -> None:
    kl = {"where": "reward", "coefficient": 0.1, "estimator": "k1"}
    batch = estimate(
        config({"kind": "ppo", "kl": kl}, prompts=2, samples=1),
        rollouts([2, 2]),
        torch.tensor([1.0, 0.0]),
        torch.full((2, 2), -0.7),
        torch.zeros(2, 2),
    )
    assert batch.returns_bt is not None
    # D = -0.5 - -0.7 = 0.2, so every token costs 0.02; returns sum what is to come
    assert batch.returns_bt[0].tolist() == pytest.approx([0.96, 0.98], abs=1e-6)


REWARDS = torch.tensor([1.0, 0.0, 0.4, 0.4])


def advantages(algorithm: dict[str, object], lengths: list[int] | None = None) -> torch.Tensor:
    """The first token's advantages of two prompts with two samples each."""
    batch = estimate(
        config(algorithm, prompts=2, samples=2), rollouts(lengths or [2, 2, 2, 2]), REWARDS, None, None
    )
    assert batch.advantages_bt is not None
    return batch.advantages_bt[:, 0]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"kind": "rloo"}, [1.0, -1.0, 0.0, 0.0]),
        ({"kind": "dr_grpo"}, [0.5, -0.5, 0.0, 0.0]),
        ({"kind": "gspo", "normalize_std": False}, [0.5, -0.5, 0.0, 0.0]),
        ({"kind": "cispo"}, [0.707106, -0.707106, 0.0, 0.0]),
        ({"kind": "dapo"}, [0.707106, -0.707106, 0.0, 0.0]),
        # centred .5, -.5, 0, 0 on two tokens each: the deviation with ddof 1 over 8 tokens is sqrt(1 / 7)
        ({"kind": "reinforce_pp", "group_baseline": True}, [1.322876, -1.322876, 0.0, 0.0]),
    ],
    ids=lambda value: str(value.get("kind")) if isinstance(value, dict) else "",
)
def test_each_algorithm_has_its_advantages(algorithm: dict[str, object], expected: list[float]) -> None:
    assert advantages(algorithm).tolist() == pytest.approx(expected, abs=1e-5)


def test_reinforce_pp_whitens_returns_over_the_batch() -> None:
    got = advantages({"kind": "reinforce_pp"})
    rewards = REWARDS.repeat_interleave(2)
    torch.testing.assert_close(got, (REWARDS - rewards.mean()) / rewards.std(), atol=1e-5, rtol=0)


def test_dapo_takes_from_long_responses_before_it_compares() -> None:
    """The limit is 256 tokens and the penalty's part 51: a response at the limit loses 1."""
    batch = estimate(
        config({"kind": "dapo"}, prompts=1, samples=2),
        rollouts([256, 2]),
        torch.tensor([1.0, 0.5]),
        None,
        None,
    )
    assert batch.advantages_bt is not None
    assert batch.advantages_bt[:, 0].tolist() == pytest.approx([-0.707106, 0.707106], abs=1e-5)


def test_a_proximal_policy_takes_the_old_place_and_the_engines_becomes_the_behaviours() -> None:
    proximal_bt = torch.full((2, 2), -0.6)
    batch = estimate(
        config({"kind": "rloo", "correction": {}}, prompts=1, samples=2),
        rollouts([2, 2]),
        torch.tensor([1.0, 0.0]),
        None,
        None,
        proximal_bt=proximal_bt,
    )
    assert batch.old_logprobs_bt is not None
    assert batch.behaviour_logprobs_bt is not None
    assert torch.equal(batch.old_logprobs_bt, proximal_bt)
    assert batch.behaviour_logprobs_bt.tolist() == [[-0.5, -0.5], [-0.5, -0.5]]


def test_an_adapted_weight_replaces_the_configured_one_in_the_reward() -> None:
    kl = {"where": "reward", "coefficient": 0.1, "estimator": "k1", "adaptive": {}}
    batch = estimate(
        config({"kind": "ppo", "kl": kl}, prompts=2, samples=1),
        rollouts([1, 1]),
        torch.tensor([1.0, 0.0]),
        torch.full((2, 1), -0.7),
        torch.zeros(2, 1),
        beta=0.5,
    )
    assert batch.returns_bt is not None
    assert batch.returns_bt[:, 0].tolist() == pytest.approx([1.0 - 0.5 * 0.2, -0.5 * 0.2], abs=1e-6)


def test_fewer_groups_than_configured_are_estimated_alike() -> None:
    """DAPO may learn from fewer groups than a step has prompts."""
    algorithm: dict[str, object] = {"kind": "dapo"}
    batch = estimate(
        config(algorithm, prompts=4, samples=2), rollouts([2, 2]), torch.tensor([1.0, 0.0]), None, None
    )
    assert batch.batch.num_rows == 2
