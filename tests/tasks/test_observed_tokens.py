"""What a tool said is in no number of training: no gradient there, and any value there is as good.

Letters: b rows, t response positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.algorithms.aggregation import GlobalCounts
from nereus.config import CampaignConfig
from nereus.emu.batch import Rollouts, Scores, TokenBatch, TrainBatch
from nereus.tasks.estimate import estimate, length_penalty
from nereus.tasks.kl_beta import beta_after
from nereus.tasks.losses import policy_loss_of, value_loss_of
from nereus.tasks.staleness import staleness

KINDS = ("grpo", "ppo", "remax", "rloo", "reinforce_pp", "dapo", "dr_grpo", "gspo", "cispo")
KL = (
    None,
    {"where": "reward", "coefficient": 0.1, "estimator": "k1", "adaptive": {"target": 0.1}},
    {"where": "loss", "coefficient": 0.1, "estimator": "k3-unbiased", "adaptive": {"target": 0.1}},
)
CORRECTIONS = (
    None,
    {"weight": "token", "high": 2.0},
    {"weight": "sequence", "high": 2.0, "rejection": {"level": "sequence-mean", "low": 0.5, "high": 2.0}},
    {"weight": "token", "low": 0.5, "high": 5.0, "beyond": "drop", "negative_limit": 0.5},
)
WIDTH, PROMPTS, SAMPLES = 9, 2, 3


def config(kind: str, kl: object, correction: object) -> CampaignConfig:
    return CampaignConfig.model_validate(
        {
            "models": {"actor": "unused"},
            "prompts": {"source": {"kind": "file", "path": "unused"}},
            "reward": {"kind": "python", "function": "unused:unused"},
            "algorithm": {"kind": kind, "kl": kl, "correction": correction, "entropy": 0.01},
            "batch": {"prompts": PROMPTS, "samples": SAMPLES},
            "sampling": {"max_new_tokens": WIDTH},
        }
    )


@dataclass(frozen=True)
class Seen:
    """What a step has of its rows: per-token values [b, t] by name, where a policy drew, rewards [b]."""

    values: dict[str, Tensor]
    policy_bt: Tensor
    rewards_b: Tensor


@st.composite
def steps(draw: st.DrawFn, num_rows: int) -> Seen:
    """Rows whose policy tokens and observations follow one another in any way, the policy's one last."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    lens = draw(st.lists(st.integers(1, WIDTH), min_size=num_rows, max_size=num_rows))
    policy_bt = torch.zeros(num_rows, WIDTH, dtype=torch.bool)
    for row, length in enumerate(lens):
        policy_bt[row, :length] = torch.rand(length, generator=generator) < 0.6
        policy_bt[row, length - 1] = True
    names = ("drawn", "reference", "proximal", "values", "now", "entropy", "values_now")
    values = {name: -torch.rand(num_rows, WIDTH, generator=generator) - 0.1 for name in names}
    rewards_b = torch.rand(num_rows, generator=generator)
    return Seen(values=values, policy_bt=policy_bt, rewards_b=rewards_b)


def lens_of(policy_bt: Tensor) -> Tensor:
    """Up to the last token of the policy."""
    return (policy_bt * torch.arange(1, policy_bt.shape[1] + 1)).amax(dim=1)


def learnt(config: CampaignConfig, seen: Seen) -> tuple[dict[str, Any], Tensor, TrainBatch]:
    """Loss and statistics of a step by name, the gradient by log-probabilities, and the rows learnt from."""
    lens_b, num_rows = lens_of(seen.policy_bt), len(seen.rewards_b)
    width = int(lens_b.max())
    inside_bt = torch.arange(width) < lens_b[:, None]
    values = {name: x_bt[:, :width].where(inside_bt, 0.0) for name, x_bt in seen.values.items()}
    rollouts = Rollouts(
        batch=TokenBatch(
            tokens_bs=torch.ones(num_rows, width + 2, dtype=torch.long),
            prompt_lens_b=torch.full((num_rows,), 2),
            response_lens_b=lens_b,
        ),
        logprobs_bt=values["drawn"],
        stopped_b=torch.ones(num_rows, dtype=torch.bool),
        sample_ids_b=torch.arange(num_rows),
        version=3,
        versions_bt=torch.where(seen.policy_bt, 3, -7)[:, :width],
        policy_bt=seen.policy_bt[:, :width],
    )
    algorithm = config.algorithm
    batch = estimate(
        config,
        rollouts,
        seen.rewards_b,
        values["reference"] if algorithm.kl else None,
        values["values"] if algorithm.kind == "ppo" else None,
        proximal_bt=values["proximal"] if algorithm.correction else None,
    )
    rows = batch.batch.num_rows
    now_bt = values["now"][:rows, : batch.mask_bt.shape[1]].clone().requires_grad_()
    entropy_bt = values["entropy"][:rows, : batch.mask_bt.shape[1]]
    counts = GlobalCounts.from_mask(batch.mask_bt, max_tokens=WIDTH)
    loss, sums = policy_loss_of(config)(Scores(logprobs_bt=now_bt, entropy_bt=entropy_bt), batch, counts)
    (gradient_bt,) = torch.autograd.grad(loss, now_bt)
    told: dict[str, Any] = {"loss": loss.item()} | {name: float(value) for name, value in sums.items()}
    if algorithm.kind == "ppo":
        values_bt = values["values_now"][:, : batch.mask_bt.shape[1]]
        critic, _ = value_loss_of(algorithm)(Scores(values_bt=values_bt), batch, counts)
        told["critic"] = critic.item()
    adapted = beta_after(config, None, batch)
    told |= {} if adapted is None else adapted.by_name()
    told |= staleness(rollouts, 5) | {"penalty": float(length_penalty(config, rollouts.policy_lens_b).sum())}
    return told, gradient_bt, batch


def rows_of(kind: str) -> int:
    return PROMPTS * (SAMPLES + (kind == "remax"))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), kl=st.sampled_from(KL), correction=st.sampled_from(CORRECTIONS))
def test_i16_observed_tokens_have_no_gradient_and_no_value_there_counts(
    kind: str, data: st.DataObject, kl: object, correction: object
) -> None:
    seen, how = data.draw(steps(rows_of(kind))), config(kind, kl, correction)
    told, gradient_bt, batch = learnt(how, seen)
    observed_bt = ~seen.policy_bt[: len(gradient_bt), : gradient_bt.shape[1]]
    assert bool((gradient_bt[observed_bt] == 0).all())
    assert batch.advantages_bt is not None
    assert bool((batch.advantages_bt[observed_bt] == 0).all())
    noise = {
        name: x_bt.where(seen.policy_bt, data.draw(st.sampled_from([float("nan"), 7.0, -30.0])))
        for name, x_bt in seen.values.items()
    }
    assert learnt(how, replace(seen, values=noise))[0] == told
    assert torch.equal(learnt(how, replace(seen, values=noise))[1], gradient_bt)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), kl=st.sampled_from(KL), correction=st.sampled_from(CORRECTIONS))
def test_a_step_learns_as_if_what_was_observed_were_not_there(
    kind: str, data: st.DataObject, kl: object, correction: object
) -> None:
    seen, how = data.draw(steps(rows_of(kind))), config(kind, kl, correction)
    order_bt = torch.argsort(~seen.policy_bt, dim=1, stable=True)  # the policy's tokens, then all others
    without = Seen(
        values={name: x_bt.gather(1, order_bt) for name, x_bt in seen.values.items()},
        policy_bt=seen.policy_bt.gather(1, order_bt),
        rewards_b=seen.rewards_b,
    )
    told, gradient_bt, batch = learnt(how, seen)
    expected, expected_bt, _ = learnt(how, without)
    assert told == pytest.approx(expected, rel=1e-5, abs=1e-6)  # float32 sums in another order
    kept_bt = batch.mask_bt.bool()
    there_bt = without.policy_bt[: len(expected_bt), : expected_bt.shape[1]]
    torch.testing.assert_close(gradient_bt[kept_bt], expected_bt[there_bt], rtol=1e-4, atol=1e-6)
