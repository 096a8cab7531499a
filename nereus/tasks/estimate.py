"""Stage estimate: from scores to advantages, on the driver, over the whole batch. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import whiten
from nereus.algorithms.gae import gae
from nereus.algorithms.grpo import grpo_advantages
from nereus.algorithms.kl import KlKind, kl_in_reward
from nereus.algorithms.missing import without_missing
from nereus.algorithms.remax import remax_advantages
from nereus.config import CampaignConfig
from nereus.emu.batch import Rollouts, TrainBatch


def estimate(
    config: CampaignConfig,
    rollouts: Rollouts,
    rewards_b: Tensor,
    reference_bt: Tensor | None,
    values_bt: Tensor | None,
) -> TrainBatch:
    """The rows to learn from, with their advantages (and returns, for a critic).

    `rollouts` and `rewards_b` hold the sampled rows and, for ReMax, the greedy rows after them; only
    sampled rows are learnt from. A row whose reward is missing gets a zero mask. Needs the whole batch,
    since groups and whitening span it.
    """
    algorithm = config.algorithm
    sampled = torch.arange(config.rows)
    greedy_b = rewards_b[config.rows :]
    rollouts, rewards_b = rollouts.select(sampled), rewards_b[: config.rows]
    produced_bt = rollouts.batch.response_mask()
    mask_bt = without_missing(produced_bt, rewards_b)
    group_b = sampled // config.batch.samples
    old_bt = rollouts.logprobs_bt[:, : produced_bt.shape[1]]

    def cut(x_bt: Tensor | None) -> Tensor | None:
        return None if x_bt is None else x_bt[: config.rows, : produced_bt.shape[1]]

    reference_bt, values_bt = cut(reference_bt), cut(values_bt)
    in_reward = algorithm.kl is not None and algorithm.kl.where == "reward"
    rewards_bt = kl_in_reward(
        rewards_b,
        old_bt,
        reference_bt if in_reward and reference_bt is not None else old_bt,
        mask_bt,
        beta=algorithm.kl.coefficient if in_reward and algorithm.kl else 0.0,
        kind=_kind(config),
    )
    returns_bt: Tensor | None = None
    match algorithm.kind:
        case "ppo":
            assert values_bt is not None, "PPO needs the critic's values"
            raw_bt, returns_bt = gae(rewards_bt, values_bt, mask_bt, gamma=algorithm.gamma, lam=algorithm.lam)
            advantages_bt = whiten(raw_bt, mask_bt)
        case "grpo":
            totals_b = torch.where(rewards_b.isnan(), rewards_b, (rewards_bt * mask_bt).sum(dim=-1))
            advantages_bt = grpo_advantages(totals_b, group_b, mask_bt, normalize_std=algorithm.normalize_std)
        case "remax":
            baselines_b = greedy_b[group_b]
            mask_bt = without_missing(mask_bt, baselines_b)
            advantages_bt = remax_advantages(rewards_bt, baselines_b, mask_bt)
    return TrainBatch(
        batch=rollouts.batch,
        mask_bt=mask_bt.float(),
        old_logprobs_bt=old_bt,
        advantages_bt=advantages_bt,
        reference_logprobs_bt=reference_bt,
        old_values_bt=values_bt,
        returns_bt=returns_bt,
    )


def _kind(config: CampaignConfig) -> KlKind:
    """The estimator of the KL term; without one its weight is zero and any will do."""
    return config.algorithm.kl.estimator.value if config.algorithm.kl else "k1"
