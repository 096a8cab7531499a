"""Stage observe: from a step's values to its record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import fmean

import torch

from nereus.emu.batch import Rollouts, TrainMetrics
from nereus.emu.cluster import Call
from nereus.emu.layout import Rank
from nereus.emu.stage import StageSpec
from nereus.emu.timings import COLLECTIVES, Observed
from nereus.record.step import StepRecord
from nereus.tasks.device import device
from nereus.tasks.estimate import num_sampled
from nereus.tasks.job import GENERATE, Job, Measured
from nereus.tasks.processes import processes_now
from nereus.tasks.score import Rewards
from nereus.tasks.stages import GENERATION, TRAINING
from nereus.tasks.turns import turn_stats


def observe(
    job: Job,
    rollouts: Rollouts,
    rewards: Rewards,
    trained: Mapping[str, TrainMetrics],
    seen: Mapping[Rank, Observed],
    stats: Mapping[str, float] | None = None,
    *,
    ahead_s: Mapping[str, float] | None = None,
) -> StepRecord:
    """The record of the step that just ended; `job.state` is already the state after it.

    Rewards and lengths are those of the sampled rows, also of those that DAPO found to teach nothing; greedy
    rows of ReMax are left out. A response's length is that of all of its tokens, observed ones among them:
    they take time and memory as others do, and the planner goes by that. `stats` are further statistics by
    name, `ahead_s` seconds by kind of work of what was done for this step ahead of it, as far as they are of
    the units of now. The overhead is the step's time in which neither a worker nor the driver worked on a
    stage: Prefect, Ray, and records. A step that was tried again is as long as all its tries.
    """
    step_s = time.perf_counter() - job.began_s
    rows = num_sampled(job.config, rollouts.batch.num_rows)
    values_b = rewards.values_b[:rows]
    present_b = values_b[~values_b.isnan()]
    lengths_b = rollouts.batch.response_lens_b[:rows].float()
    prompt_tokens = int(rollouts.batch.prompt_lens_b.sum())
    response_tokens = int(rollouts.batch.response_lens_b.sum())
    work_s = dict(job.stage_s)
    if job.config.asynchrony is not None:
        work_s.pop(GENERATE, None)  # with the waits for weight syncs
    work_s |= job.take_busy_s() | dict(ahead_s or {})
    memory_bytes = {rank: one.peak_bytes for rank, one in seen.items()}
    job.measured = Measured(
        lengths_b=lengths_b,
        work_s={} if job.again else work_s,
        memory_bytes=known_memory(job, memory_bytes) if device(job.config) == "cuda" else {},
        terms_s={} if job.again else terms_of(seen, job.stages),
    )
    actor = trained.get(TRAINING)
    return StepRecord(
        step=job.state.step - 1,
        version=rollouts.version,
        epoch=job.state.cursor.epoch,
        position=job.state.cursor.position,
        reward_mean=float(present_b.mean()) if len(present_b) else None,
        reward_min=float(present_b.min()) if len(present_b) else None,
        reward_max=float(present_b.max()) if len(present_b) else None,
        num_missing_rewards=rows - len(present_b),
        length_mean=float(lengths_b.mean()),
        length_p95=float(torch.quantile(lengths_b, 0.95)),
        length_max=int(lengths_b.max()),
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        stage_s=dict(job.stage_s),
        step_s=step_s,
        tokens_per_s=(prompt_tokens + response_tokens) / step_s,
        memory_bytes={f"worker {rank}": size for rank, size in memory_bytes.items()},
        plan={name: spec.text for name, spec in job.stages.items()},
        learning_rate=actor.learning_rate if actor else 0.0,
        stats={
            **_stats(trained),
            **rewards.stats(),
            **_of_tools(job, rollouts, rows),
            **processes_now(job),
            **(stats or {}),
        },
        overhead_s=max(0.0, step_s - _path_s(work_s, job.stage_s)),
    )


def _of_tools(job: Job, rollouts: Rollouts, rows: int) -> dict[str, float]:
    """What is told of turns, and of tools that failed since the last step; nothing without tools."""
    if job.tools is None:
        return {}
    failed = {f"tools_failed/{reason}": float(num) for reason, num in job.tools.take_failures().items()}
    return turn_stats(rollouts.select(torch.arange(rows))) | failed


def known_memory(job: Job, memory_bytes: Mapping[Rank, int]) -> dict[Rank, int]:
    """With the last peaks of workers that draw responses and could not be asked: the fullest is among all."""
    before = {} if job.measured is None else job.measured.memory_bytes
    unasked = set(job.cluster.ranks) & set(job.stages[GENERATION].ranks) - set(memory_bytes)
    return {**{rank: size for rank, size in before.items() if rank in unasked}, **memory_bytes}


CONCURRENT = ("score rewards", "score reference", "score frozen", "score policy", "score values")
SEEN_AS = {"score frozen": "score reference"}
"""The stage of a kind of work that has no stage of its own name."""
AHEAD = (GENERATE, "score rewards")


def _path_s(work_s: Mapping[str, float], stage_s: Mapping[str, float]) -> float:
    """Seconds that the stages take one after the other, concurrent scoring counted by its longest, without
    what was scored while others still generated. Where a step waits for rows instead of drawing them, others
    draw them meanwhile.
    """
    if "wait for rows" in work_s:
        work_s = {name: seconds for name, seconds in work_s.items() if name not in AHEAD}
    alone = sum(seconds for name, seconds in work_s.items() if name not in CONCURRENT)
    beside = (
        min(work_s[name], stage_s.get(SEEN_AS.get(name, name), work_s[name]))
        for name in CONCURRENT
        if name in work_s
    )
    return alone + max(beside, default=0.0)


def _stats(trained: Mapping[str, TrainMetrics]) -> dict[str, float]:
    out: dict[str, float] = {}
    for stage, metrics in trained.items():
        model = stage.split(".")[0]
        out[f"loss/{model}"] = metrics.loss
        out[f"gradient_norm/{model}"] = metrics.gradient_norm
        out |= {f"{name}/{model}": value for name, value in metrics.stats.items()}
        out |= {f"{name}_s/{model}": value for name, value in metrics.seconds.items()}
    return out


def peak_memory(job: Job, *, but: Iterable[Rank] = ()) -> dict[Rank, Observed]:
    """What every worker but these has to tell: its peak memory, and what its calls took."""
    asked = [rank for rank in job.cluster.ranks if rank not in set(but)]
    return job.cluster.run(dict.fromkeys(asked, Call("observe")), what="observe")


def terms_of(seen: Mapping[Rank, Observed], stages: Mapping[str, StageSpec]) -> dict[str, dict[str, float]]:
    """Seconds by call (`actor.training/train`) and term: the mean over the model-stage's units, also over
    those that had no part. What is scored early is not shared out evenly, and the cost model counts on even
    shares.

    Of a collective a unit's shortest counts: who comes last waits for nobody, so that is what it takes by
    itself. Of all others the mean over its workers.
    """
    out: dict[str, dict[str, float]] = {}
    for call in {call for one in seen.values() for call in one.terms}:
        units = stages[call.split("/")[0]].units
        for unit in units:
            told = [
                seen[rank].terms[call] for rank in unit.ranks if rank in seen and call in seen[rank].terms
            ]
            for term in {term for terms in told for term in terms}:
                all_s = [terms[term] for terms in told if term in terms]
                own_s = min(all_s) if term in COLLECTIVES else fmean(all_s)
                terms_s = out.setdefault(call, {})
                terms_s[term] = terms_s.get(term, 0.0) + own_s / len(units)
    return out
