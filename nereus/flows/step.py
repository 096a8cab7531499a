"""One step of a campaign: what happens, in order.

    rows ─▶ {rewards | reference | policy | values} ─▶ estimate ─▶ critic, actor learn ─▶ publish

A step changes the logical state at its end only: until then a crash or a stop leaves the state before it.
Before inference and before training a job that adapts leaves the GPUs that would go away in them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from nereus.config import Tracking
from nereus.emu.batch import TrainMetrics
from nereus.flows.adapt import leave_in_time
from nereus.flows.campaign import MAX_CONCURRENT
from nereus.flows.current import current_job, subflow_of
from nereus.flows.row_source import current_source
from nereus.flows.step_run import StepRuns
from nereus.flows.tracking import Calls, Once, PlainCalls, TaskRuns, level, steps_a_run
from nereus.planner.workload import Stage
from nereus.record.step import StepRecord
from nereus.tasks.early import early_of
from nereus.tasks.estimate import estimate
from nereus.tasks.groups_kept import Answered
from nereus.tasks.job import Job
from nereus.tasks.kl_beta import beta_after
from nereus.tasks.learn import learn
from nereus.tasks.losses import policy_loss_of, value_loss_of
from nereus.tasks.observe import observe, peak_memory
from nereus.tasks.publish import publish
from nereus.tasks.rates import learning_rate
from nereus.tasks.score import score_policy, score_reference, score_values
from nereus.tasks.stages import CRITIC, GENERATION, TRAINING


def run_step(job: Job, calls: Calls) -> StepRecord:
    """Run the next step and return its record. `job.state` then is the state after it.

    When a stage fails, or a stop is raised in this thread, the waits of the other stages are told to end: the
    task runner that owns their threads would wait for them.
    """
    try:
        return _run_stages(job, calls)
    except BaseException:
        job.cluster.halt()
        raise


def _run_stages(job: Job, calls: Calls) -> StepRecord:
    job.begin_step()
    config, step = job.config, job.state.step
    ppo = config.algorithm if config.algorithm.kind == "ppo" else None
    beta = job.state.kl_beta

    once, source = Once(job.done, calls), current_source()

    gathered = source.rows(job, once)
    rows = gathered.rollouts.batch

    leave_in_time(job, Stage.INFERENCE, beside=gathered.rewards)
    reference = once.start("reference", score_reference, job, rows) if config.algorithm.kl else None
    policy = once.start("policy", score_policy, job, rows) if config.rescores else None
    critic = once.start("values", score_values, job, rows) if ppo else None
    rewards = gathered.rewards.result()
    reference_bt = None if reference is None else reference.result()
    proximal_bt = None if policy is None else policy.result()
    values_bt = None if critic is None else critic.result()

    with job.stage("estimate"):
        batch = estimate(
            config,
            gathered.rollouts,
            rewards.values_b,
            reference_bt,
            values_bt,
            proximal_bt=proximal_bt,
            beta=beta,
        )
        adapted = beta_after(config, beta, batch)

    leave_in_time(job, Stage.TRAINING)
    trained: dict[str, TrainMetrics] = {}
    if ppo:
        rate, loss = learning_rate(config, "critic", step), value_loss_of(ppo)
        trained[CRITIC] = once.start("critic", learn, job, CRITIC, batch, loss, rate).result()
    if ppo is None or step >= ppo.critic_warmup_steps:
        rate, objective = learning_rate(config, "actor", step), policy_loss_of(config, beta=beta)
        trained[TRAINING] = once.start("actor", learn, job, TRAINING, batch, objective, rate).result()

    with source.weight_sync(job) as generation_rests:
        if TRAINING in trained and generation_rests:
            once.start("publish", publish, job).result()
        memory = peak_memory(job, but=() if generation_rests else job.stages[GENERATION].ranks)
        job.state = replace(
            job.state,
            step=step + 1,
            policy_version=job.state.policy_version + (TRAINING in trained),
            cursor=gathered.cursor,
            kl_beta=None if adapted is None else adapted.beta,
        )
        source.advance(job.state, synced=generation_rests)
    job.stage_s.update(gathered.stage_s)
    used = gathered.used or Answered(rollouts=gathered.rollouts, rewards=rewards)
    stats = dict(gathered.stats)
    if adapted is not None:
        stats |= adapted.by_name()
    if (early := early_of(job)) is not None:
        stats |= early.stats()
    ahead_s = gathered.work_under(job.stages[GENERATION])
    return observe(job, used.rollouts, used.rewards, trained, memory, stats, ahead_s=ahead_s)


@flow(
    name="step",
    flow_run_name="step {number}",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT),  # type: ignore[arg-type]
    validate_parameters=False,
)
def step_flow(number: int) -> StepRecord:
    """Step `number` as a flow run of its own, with a task run for every stage."""
    return run_step(current_job(), TaskRuns())


class Tracker:
    """Runs steps, and tells the server as much of each as the setting and the length of the last one say."""

    def __init__(self, setting: Tracking) -> None:
        self._setting = setting
        self._last_step_s: float | None = None
        self._runs = StepRuns()

    def close(self) -> None:
        """No step follows."""
        self._runs.close()

    def step(self, job: Job) -> StepRecord:
        """Run the next step."""
        record = self._run(job, level(self._setting, self._last_step_s))
        self._last_step_s = record.step_s
        return record

    def _run(self, job: Job, shown: Tracking) -> StepRecord:
        if shown == Tracking.step:
            with PlainCalls() as calls:
                num = steps_a_run(self._setting, self._last_step_s)
                return self._runs.step(job.state.step, num, partial(run_step, job, calls))
        self._runs.end()
        if shown == Tracking.tasks:
            return run_step(job, TaskRuns())
        with subflow_of(job):
            return step_flow(job.state.step)
