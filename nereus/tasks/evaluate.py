"""Stage evaluate: the policy answers held-out prompts between two steps, and training does not notice.

Sampling is keyed by a seed of its own and by no step, so training draws what it would have drawn anyway, and
two evaluations differ by the policy alone.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from torch import Tensor

from nereus.algorithms.pass_at_k import pass_at_k
from nereus.record.evaluations import EvaluationRecord, append_evaluation, read_evaluations, scalars
from nereus.tasks.generate import answers, prompt_batch, prompt_of_rows, sampling_of
from nereus.tasks.job import Job
from nereus.tasks.observe import peak_memory
from nereus.tasks.score import rewards_of

SEED = 0x6576616C  # "eval"


def is_due(job: Job) -> bool:
    """Whether the job's state is one to evaluate: every so many steps, before the first and after the
    last.
    """
    evaluation, step = job.config.evaluation, job.state.step
    if evaluation is None:
        return False
    if step == 0:
        return evaluation.at_start
    return step == job.config.steps or step % evaluation.every_steps == 0


def is_recorded(job: Job) -> bool:
    """Whether a run that continues here has evaluated this state before it ended."""
    return any(record.step == job.state.step for record in read_evaluations(job.config.run_folder))


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(job: Job, version: int) -> EvaluationRecord:
    """Answer the held-out prompts with the policy that generation has, of this version; record how well.

    Generation must be at rest. What the workers measured meanwhile is forgotten: it belongs to no step.
    """
    evaluation, held_out = job.config.evaluation, job.prepared.held_out
    assert evaluation is not None, "an evaluation was configured"
    assert held_out is not None, "its prompts were loaded"
    began_s = time.perf_counter()
    with job.stage("evaluate"):
        prompts = held_out.prompts(range(held_out.num_prompts))
        batch = prompt_batch(prompts, evaluation.samples, with_greedy=False)
        if evaluation.samples == 1:
            batch = replace(batch, greedy_b=torch.ones_like(batch.greedy_b))
        of_row = prompt_of_rows(prompts, evaluation.samples, batch.num_rows)
        sampling = replace(sampling_of(job), seed=job.config.seed ^ SEED, step=0)
        rollouts = answers(job, batch, of_row, sampling, version, what="evaluate")
        rewards = rewards_of(job, of_row, rollouts)
    present_b = rewards.values_b[~rewards.values_b.isnan()]
    passed_b = rewards.values_b >= evaluation.pass_reward  # NaN is not
    record = EvaluationRecord(
        step=job.state.step,
        version=version,
        num_prompts=len(prompts),
        num_samples=evaluation.samples,
        reward_mean=float(present_b.double().mean()) if len(present_b) else None,
        num_missing_rewards=len(rewards.values_b) - len(present_b),
        pass_at={str(k): mean_pass_at(passed_b, evaluation.samples, k) for k in evaluation.pass_at},
        length_mean=float(rollouts.batch.response_lens_b.double().mean()),
        num_cut=int((~rollouts.stopped_b).sum()),
        seconds=time.perf_counter() - began_s,
    )
    peak_memory(job)
    append_evaluation(job.config.run_folder, record)
    job.log.mirror(dict(scalars(record)), record.step)
    return record


def mean_pass_at(passed_b: Tensor, samples: int, k: int) -> float:
    """pass@k, mean over prompts; `passed_b` has `samples` rows for each, prompt after prompt."""
    counts = passed_b.reshape(-1, samples).sum(1).tolist()
    return sum(pass_at_k(samples, count, k) for count in counts) / len(counts)
