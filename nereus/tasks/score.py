"""Stage score: rewards, log-probabilities of reference and trained policy, the critic's values, each for
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from nereus.algorithms.missing import rewards_tensor
from nereus.data.prompt import Prompt
from nereus.emu.batch import Rollouts, Scores, TokenBatch
from nereus.rewards.function import MissingReason, RewardRequest, missing_by_reason
from nereus.tasks.dealing import run_dealt
from nereus.tasks.early import early_of
from nereus.tasks.generate import prompt_of_rows
from nereus.tasks.job import Job
from nereus.tasks.scoring import (
    OF_POLICY,
    OF_REWARDS,
    OF_VALUES,
    Scoring,
    by_length,
    joined,
    reference_scoring,
)
from nereus.tasks.turns import turns_of


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Float32 `values_b`, NaN where missing, for every row of the rollouts; and why those are missing,
    counted. `queue_s` is how long each row waited for its scoring, where it had to.
    """

    values_b: Tensor
    missing: Mapping[MissingReason, int]
    queue_s: Sequence[float] = ()

    def stats(self) -> dict[str, float]:
        """What a step's record tells of them, by name."""
        told = {f"missing/{reason}": float(number) for reason, number in self.missing.items()}
        if self.queue_s:
            told |= {"reward_queue_s/mean": fmean(self.queue_s), "reward_queue_s/max": max(self.queue_s)}
        return told


@task(name="score rewards", cache_policy=NO_CACHE)
def score_rewards(job: Job, prompts: Sequence[Prompt], rollouts: Rollouts) -> Rewards:
    """The reward of every row: by the reward function in its own processes, or by the reward model."""
    with job.stage("score rewards"):
        if job.reward is None:
            return Rewards(values_b=score_stage(job, OF_REWARDS, rollouts.batch), missing={})
        num_rows = rollouts.batch.num_rows
        return rewards_of(job, prompt_of_rows(prompts, job.config.batch.samples, num_rows), rollouts)


def rewards_of(job: Job, prompt_of_row: Sequence[Prompt], rollouts: Rollouts) -> Rewards:
    """The reward of every row, by function or model."""
    if job.reward is None:
        return Rewards(values_b=score_all(job, OF_REWARDS, rollouts.batch), missing={})
    decode, masks = job.prepared.tokenizer.decode, drawn_by_policy(rollouts)
    requests = [
        RewardRequest(
            prompt=prompt.text,
            response=decode(ids),
            response_token_ids=ids,
            turns=tuple(map(decode, turns_of(ids, drawn))),
            ground_truth=prompt.ground_truth,
            extra=prompt.extra,
            sample_id=prompt.sample_id,
        )
        for prompt, ids, drawn in zip(prompt_of_row, response_ids(rollouts), masks, strict=True)
    ]
    results = job.reward.score(requests)
    values_b = rewards_tensor([result.value for result in results])
    return Rewards(
        values_b=values_b,
        missing=missing_by_reason(results),
        queue_s=tuple(result.queue_s for result in results),
    )


@task(name="score reference", cache_policy=NO_CACHE)
def score_reference(job: Job, batch: TokenBatch) -> Tensor:
    """The reference policy's log-probabilities of the responses; [b, t]."""
    with job.stage("score reference"):
        scores: Scores = score_stage(job, reference_scoring(job.config), batch)
    assert scores.logprobs_bt is not None, "a policy returns log-probabilities"
    return scores.logprobs_bt


@task(name="score policy", cache_policy=NO_CACHE)
def score_policy(job: Job, batch: TokenBatch) -> Tensor:
    """The trained policy's own log-probabilities of the responses, before the update; [b, t]."""
    with job.stage("score policy"):
        scores: Scores = score_stage(job, OF_POLICY, batch)
    assert scores.logprobs_bt is not None, "a policy returns log-probabilities"
    return scores.logprobs_bt


@task(name="score values", cache_policy=NO_CACHE)
def score_values(job: Job, batch: TokenBatch) -> Tensor:
    """The critic's values at the response's tokens; [b, t]."""
    with job.stage("score values"):
        scores: Scores = score_stage(job, OF_VALUES, batch)
    assert scores.values_bt is not None, "a critic returns values"
    return scores.values_bt


def score_stage(job: Job, scoring: Scoring, batch: TokenBatch) -> Any:
    """What the scoring finds for the step's rows, in their order: `Scores`, or a tensor of rewards. What was
    scored while others still generated is not done again.
    """
    early = early_of(job)
    return score_all(job, scoring, batch) if early is None else early.work(scoring).finish()


def score_all(job: Job, scoring: Scoring, batch: TokenBatch) -> Any:
    """What the scoring finds for any rows, dealt to its units beforehand."""
    parts, order = run_dealt(
        job,
        scoring.stage,
        by_length(batch),
        lambda rows: scoring.call(job, batch.select(rows)),
        what=scoring.what,
    )
    return joined(parts, order)


def drawn_by_policy(rollouts: Rollouts) -> list[list[bool]]:
    """Which tokens of every response the policy drew."""
    lengths = rollouts.batch.response_lens_b.tolist()
    masks = rollouts.policy_mask().tolist()
    return [mask[:length] for mask, length in zip(masks, lengths, strict=True)]


def response_ids(rollouts: Rollouts) -> list[tuple[int, ...]]:
    """The token ids of every response, as the engine produced them."""
    batch = rollouts.batch
    starts, lengths = batch.prompt_lens_b.tolist(), batch.response_lens_b.tolist()
    return [
        tuple(batch.tokens_bs[i, start : start + length].tolist())
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
