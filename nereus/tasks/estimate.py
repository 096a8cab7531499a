"""Stage estimate: from scores to advantages, on the driver, over the whole batch. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.algorithms.aggregation import whiten
from nereus.algorithms.dapo import overlong_penalty
from nereus.algorithms.gae import gae
from nereus.algorithms.grpo import grpo_advantages
from nereus.algorithms.kl import kl_in_reward, value_kind
from nereus.algorithms.missing import without_missing
from nereus.algorithms.reinforce_pp import reinforce_pp_advantages, reinforce_pp_baseline_advantages
from nereus.algorithms.remax import remax_advantages
from nereus.algorithms.rloo import rloo_advantages
from nereus.config import CampaignConfig
from nereus.emu.batch import Rollouts, TrainBatch


def estimate(
    config: CampaignConfig,
    rollouts: Rollouts,
    rewards_b: Tensor,
    reference_bt: Tensor | None,
    values_bt: Tensor | None,
    *,
    proximal_bt: Tensor | None = None,
    beta: float | None = None,
) -> TrainBatch:
    """The rows to learn from, with their advantages (and returns, for a critic).

    `rollouts` and `rewards_b` hold the sampled rows, `batch.samples` a prompt, and, for ReMax, the greedy
    rows after them; only sampled rows are learnt from. A row whose reward is missing gets a zero mask. Needs
    the whole batch, since groups and whitening span it. Observed tokens have a zero mask, no reward and no
    advantage, and a response is as long as what the policy drew of it.

    `proximal_bt` are the trained policy's log-probabilities before the update where they are not taken to be
    the engine's; with a correction those then are the behaviour policy's. `beta` is the weight of a KL term
    in the reward where it adapts, else the configured one.
    """
    rows = num_sampled(config, rollouts.batch.num_rows)
    sampled = torch.arange(rows)
    greedy_b = rewards_b[rows:]
    rollouts, rewards_b = rollouts.select(sampled), rewards_b[:rows]
    drawn_mask_bt = rollouts.policy_mask()
    width = drawn_mask_bt.shape[1]
    mask_bt = without_missing(drawn_mask_bt, rewards_b)
    group_b = sampled // config.batch.samples

    def cut(x_bt: Tensor | None) -> Tensor | None:
        return None if x_bt is None else x_bt[:rows, :width]

    drawn_bt = rollouts.logprobs_bt[:, :width]
    reference_bt, values_bt, proximal_bt = cut(reference_bt), cut(values_bt), cut(proximal_bt)
    old_bt = drawn_bt if proximal_bt is None else proximal_bt
    scores_b = rewards_b + length_penalty(config, rollouts.policy_lens_b)
    rewards_bt = _token_rewards(config, scores_b, old_bt, reference_bt, mask_bt, beta)
    returns_bt: Tensor | None = None
    if config.algorithm.kind == "ppo":
        assert values_bt is not None, "PPO needs the critic's values"
        gamma, lam = config.algorithm.gamma, config.algorithm.lam
        raw_bt, returns_bt = gae(rewards_bt, values_bt, mask_bt, gamma=gamma, lam=lam)
        advantages_bt = whiten(raw_bt, mask_bt)
    elif config.algorithm.kind == "remax":
        baselines_b = greedy_b[group_b]
        mask_bt = without_missing(mask_bt, baselines_b)
        advantages_bt = remax_advantages(rewards_bt, baselines_b, mask_bt)
    else:
        advantages_bt = _compared(config, rewards_b, rewards_bt, group_b, mask_bt)
    return TrainBatch(
        batch=rollouts.batch,
        mask_bt=mask_bt.float(),
        old_logprobs_bt=old_bt,
        advantages_bt=advantages_bt,
        reference_logprobs_bt=reference_bt,
        old_values_bt=values_bt,
        returns_bt=returns_bt,
        behaviour_logprobs_bt=drawn_bt if proximal_bt is not None and config.algorithm.correction else None,
    )


def num_sampled(config: CampaignConfig, num_rows: int) -> int:
    """How many of a step's rows were sampled; the others are the greedy ones of ReMax, one a prompt."""
    samples = config.batch.samples
    return num_rows * samples // (samples + 1) if config.algorithm.kind == "remax" else num_rows


def length_penalty(config: CampaignConfig, lengths_b: Tensor) -> Tensor:
    """What the responses' lengths add to their rewards; [b]."""
    algorithm, limit = config.algorithm, config.sampling.max_new_tokens
    if algorithm.kind != "dapo" or algorithm.overlong_share is None:
        return torch.zeros(len(lengths_b))
    buffer = max(1, round(algorithm.overlong_share * limit))
    return overlong_penalty(
        lengths_b, max_tokens=limit, buffer_tokens=buffer, factor=algorithm.overlong_penalty
    )


def _token_rewards(
    config: CampaignConfig,
    scores_b: Tensor,
    old_bt: Tensor,
    reference_bt: Tensor | None,
    mask_bt: Tensor,
    beta: float | None,
) -> Tensor:
    """Per-token rewards: the score on the last token, less a KL term in the reward."""
    kl = config.algorithm.kl
    if kl is None or kl.where != "reward":
        return kl_in_reward(scores_b, old_bt, old_bt, mask_bt, beta=0.0, kind="k1")
    assert reference_bt is not None, "a KL term needs the reference's log-probabilities"
    weight = kl.coefficient if beta is None else beta
    kind = value_kind(kl.estimator.value)
    return kl_in_reward(scores_b, old_bt, reference_bt, mask_bt, beta=weight, kind=kind)


def _compared(
    config: CampaignConfig, rewards_b: Tensor, rewards_bt: Tensor, group_b: Tensor, mask_bt: Tensor
) -> Tensor:
    """Advantages of the algorithms that compare whole responses with one another; [b, t]."""
    totals_b = torch.where(rewards_b.isnan(), rewards_b, (rewards_bt * mask_bt).sum(dim=-1))
    match config.algorithm.kind:
        case "rloo":
            return rloo_advantages(totals_b, group_b, mask_bt)
        case "reinforce_pp":
            if config.algorithm.group_baseline:
                return reinforce_pp_baseline_advantages(totals_b, group_b, mask_bt)
            return reinforce_pp_advantages(rewards_bt, mask_bt, gamma=config.algorithm.gamma)
        case "dr_grpo":
            return grpo_advantages(totals_b, group_b, mask_bt, normalize_std=False)
        case "dapo":
            return grpo_advantages(totals_b, group_b, mask_bt)
        case "grpo" | "gspo" | "cispo":
            return grpo_advantages(totals_b, group_b, mask_bt, normalize_std=config.algorithm.normalize_std)
        case other:
            raise AssertionError(f"{other} compares no responses")
