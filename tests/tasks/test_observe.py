"""The record of a step, also of one that was tried again because a worker died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from nereus.config import CampaignConfig
from nereus.config.asynchrony import AsynchronyConfig
from nereus.emu.batch import Rollouts, TokenBatch
from nereus.record.metrics import MetricsLog
from nereus.tasks.adapt import STAGE_OF_WORK
from nereus.tasks.job import CampaignState, Job, Measured
from nereus.tasks.observe import known_memory, observe
from nereus.tasks.score import Rewards


class Idle:
    """A cluster without workers that was busy generating for ten seconds."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def take_busy_s(self, of: Callable[[str], bool]) -> dict[str, float]:
        return {what: took for what, took in (("generate", 10.0), ("learn actor.training", 4.0)) if of(what)}


class Prepared:
    """The configuration of a campaign and nothing else."""

    config = CampaignConfig.model_validate(
        {
            "models": {"actor": "model"},
            "prompts": {"source": {"kind": "file", "path": "prompts.jsonl"}},
            "reward": {"kind": "python", "function": "reward.py:reward"},
            "batch": {"prompts": 1, "samples": 2},
        }
    )


class Silent:
    """A listener that hears nothing."""

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None: ...

    def on_step(self, record: object) -> None: ...

    def on_message(self, text: str) -> None: ...


def job_in(folder: Path) -> Job:
    return Job(
        prepared=cast(Any, Prepared()),
        cluster=cast(Any, Idle()),
        stages={},
        planned={},
        adapter=None,
        weight_sync=None,
        reward=None,
        log=MetricsLog(folder),
        listener=Silent(),
        state=CampaignState(),
        adam_steps={},
    )


ROLLOUTS = Rollouts(
    batch=TokenBatch(
        tokens_bs=torch.ones(2, 6, dtype=torch.long),
        prompt_lens_b=torch.tensor([3, 3]),
        response_lens_b=torch.tensor([1, 3]),
    ),
    logprobs_bt=torch.zeros(2, 3),
    stopped_b=torch.ones(2, dtype=torch.bool),
    sample_ids_b=torch.arange(2),
    version=0,
)
REWARDS = Rewards(values_b=torch.tensor([1.0, float("nan")]), missing={})


def test_a_step_that_was_tried_again_is_as_long_as_all_its_tries(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.begin_step()
    time.sleep(0.05)
    job.begin_step()
    assert job.again
    record = observe(job, ROLLOUTS, REWARDS, {}, {})
    assert record.step_s >= 0.05
    assert record.tokens_per_s <= 10 / 0.05


def test_only_a_step_that_stayed_says_how_fast_its_plan_is(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.begin_step()
    observe(job, ROLLOUTS, REWARDS, {}, {})
    assert job.measured is not None
    assert job.measured.work_s == {"generate": 10.0, "learn actor.training": 4.0}
    job.begin_step()
    observe(job, ROLLOUTS, REWARDS, {}, {})
    assert job.measured.work_s == {}
    assert job.measured.lengths_b.tolist() == [1, 3]


def test_what_was_drawn_ahead_counts_as_it_was_measured_there_and_waiting_for_it_as_nothing(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path)
    config = Prepared.config.model_copy(update={"asynchrony": AsynchronyConfig(staleness=1)})
    job.prepared = cast(Any, SimpleNamespace(config=config))
    job.begin_step()
    # The wait, and a stage that lasted longer than its work because it waited for weight syncs.
    job.stage_s |= {"wait for rows": 50.0, "generate": 99.0}
    observe(job, ROLLOUTS, REWARDS, {}, {}, ahead_s={"generate": 7.0})
    assert job.measured is not None
    work_s = job.measured.work_s
    assert (work_s["generate"], work_s["learn actor.training"]) == (7.0, 4.0)
    assert not {name for name, took_s in work_s.items() if took_s > 7.0} & set(STAGE_OF_WORK)
    job.tried = -1
    job.begin_step()
    observe(job, ROLLOUTS, REWARDS, {}, {}, ahead_s={})  # drawn by units that are gone
    assert "generate" not in job.measured.work_s


def test_workers_that_draw_and_cannot_be_asked_keep_their_last_peak(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.cluster = cast(Any, SimpleNamespace(ranks=(0, 2)))
    job.stages = {"actor.generation": cast(Any, SimpleNamespace(ranks=(1, 2)))}
    job.measured = Measured(lengths_b=torch.ones(1), work_s={}, memory_bytes={0: 5, 1: 7, 2: 9})
    assert known_memory(job, {0: 6}) == {0: 6, 2: 9}
    assert known_memory(job, {0: 6, 2: 8}) == {0: 6, 2: 8}
    job.measured = None
    assert known_memory(job, {0: 6}) == {0: 6}


def test_missing_rewards_are_counted_and_left_out_of_the_mean(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.begin_step()
    record = observe(job, ROLLOUTS, REWARDS, {}, {})
    assert (record.reward_mean, record.num_missing_rewards) == (1.0, 1)
