"""Between two steps: as many reward and tool processes as what their calls took asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from nereus.config import CampaignConfig
from nereus.planner.processes import CallsSeen, Chosen, reward_processes, tool_processes
from nereus.record.processes import ProcessesRecord, append_processes
from nereus.record.step import StepRecord
from nereus.rewards.pool import CallLoad, ProcessPool
from nereus.rewards.process import ProcessReward
from nereus.tasks.job import Job

BESIDE_SCORING = ("score reference", "score policy", "score values")
Rule = Callable[..., Chosen]


def size_processes(job: Job, record: StepRecord) -> None:
    """Choose the numbers anew after this step; numbers that the configuration gives stay.

    They hold from the next call on, and nothing waits for that: a process that is one too many ends its call
    first. A step that was tried again tells nothing: its calls are those of several tries.
    """
    config = job.config
    if isinstance(job.reward, ProcessReward):
        load = job.reward.pool.take_load()
        if load.num_calls and not job.again and not reward_is_fixed(config):
            seen = calls_seen(load, window_s=hidden_s(config, record), step_s=record.step_s)
            _size(job, "reward", job.reward.pool, seen, reward_processes)
    if job.tools is not None and config.tools is not None:
        load = job.tools.take_load()
        if load.num_calls and not job.again and config.tools.workers is None:
            window_s = record.stage_s.get("generate", record.step_s)
            seen = calls_seen(load, window_s=window_s, step_s=record.step_s)
            _size(job, "tool", job.tools.pool, seen, tool_processes)


def processes_now(job: Job) -> dict[str, float]:
    """How many processes there are, as a step's record tells it."""
    told: dict[str, float] = {}
    if isinstance(job.reward, ProcessReward):
        told["reward_processes"] = float(job.reward.pool.num_processes)
    if job.tools is not None:
        told["tool_processes"] = float(job.tools.pool.num_processes)
    return told


def reward_is_fixed(config: CampaignConfig) -> bool:
    """Whether the configuration gives the number of reward processes."""
    reward = config.reward
    if reward.kind == "judge" or reward.kind == "model":
        return True
    return reward.workers is not None or (reward.kind == "python" and reward.batched)


def hidden_s(config: CampaignConfig, record: StepRecord) -> float:
    """Seconds of a step in which rewards are computed and nobody waits for them: those of the next step's
    generation where that runs ahead, else of the forward passes beside them. DAPO waits at once.
    """
    if config.algorithm.kind == "dapo":
        return 0.0
    if config.runs_ahead:
        return record.stage_s.get("generate", 0.0)
    return max(record.stage_s.get(name, 0.0) for name in BESIDE_SCORING)


def calls_seen(load: CallLoad, *, window_s: float, step_s: float) -> CallsSeen:
    """A step's calls as the planner reads them."""
    return CallsSeen(
        num_calls=load.num_calls,
        call_s=load.busy_s / load.num_calls,
        longest_s=load.longest_s,
        cpu_share=min(1.0, load.cpu_s / load.busy_s) if load.busy_s > 0 else 0.0,
        window_s=window_s,
        step_s=step_s,
    )


def free_cores(job: Job) -> int:
    """Cores of the driver's machine that its workers and the driver leave; one at least."""
    used = job.cluster.num_local * job.config.cluster.threads + 1
    return max(1, len(os.sched_getaffinity(0)) - used)


def _size(job: Job, what: Literal["reward", "tool"], pool: ProcessPool, seen: CallsSeen, rule: Rule) -> None:
    seen = job.calls_seen[what] = seen.blended(job.calls_seen.get(what))
    cores = free_cores(job)
    chosen = rule(seen, pool.num_processes, cores=cores)
    if chosen.number == chosen.before:
        return
    pool.resize(chosen.number)
    append_processes(
        job.config.run_folder,
        ProcessesRecord(
            step=job.state.step,
            what=what,
            before=chosen.before,
            number=chosen.number,
            num_calls=seen.num_calls,
            call_s=seen.call_s,
            longest_s=seen.longest_s,
            cpu_share=seen.cpu_share,
            window_s=seen.window_s,
            limit_s=chosen.limit_s,
            cores=cores,
            why=chosen.why,
        ),
    )
    job.listener.on_message(f"{what} processes {chosen.before} → {chosen.number}: {chosen.why}")
