"""Between two steps the numbers of processes follow what calls took, unless the configuration gives them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nereus.config import CampaignConfig
from nereus.record.processes import read_processes
from nereus.rewards.pool import CallLoad, ProcessPool
from nereus.rewards.process import ProcessReward
from nereus.tasks import processes
from nereus.tasks.job import CampaignState, Job
from nereus.tasks.processes import hidden_s, processes_now, reward_is_fixed, size_processes
from tests.record.records import make_record

SLOW = CallLoad(num_calls=64, busy_s=32.0, cpu_s=0.0, longest_s=1.0)
QUICK = CallLoad(num_calls=64, busy_s=0.064, cpu_s=0.0, longest_s=0.001)
PYTHON: dict[str, Any] = {"kind": "python", "function": "reward.py:score"}


def config(folder: Path, **parts: Any) -> CampaignConfig:
    base = {
        "output": str(folder),
        "models": {"actor": "unused"},
        "prompts": {"source": {"kind": "file", "path": "unused"}},
        "reward": PYTHON,
    }
    return CampaignConfig.model_validate(base | parts)


class Told:
    """A pool that starts nothing, whose calls took what a test says."""

    def __init__(self, *loads: CallLoad) -> None:
        self._loads = list(loads)
        self.num_processes = 1

    def take_load(self) -> CallLoad:
        return self._loads.pop(0)

    def resize(self, num_processes: int) -> None:
        self.num_processes = num_processes


def job_of(config: CampaignConfig, *loads: CallLoad, tools: Told | None = None) -> Job:
    reward = ProcessReward(target="reward.py:score", limit_s=1)
    reward.pool = cast(ProcessPool, Told(*loads))
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return cast(
        Job,
        SimpleNamespace(
            config=config,
            reward=reward,
            tools=None if tools is None else SimpleNamespace(pool=tools, take_load=tools.take_load),
            calls_seen={},
            again=False,
            state=CampaignState(step=7),
            cluster=SimpleNamespace(num_local=2),
            listener=SimpleNamespace(on_message=lambda text: None),
        ),
    )


def test_slow_rewards_get_processes_and_quick_ones_give_them_back(tmp_path: Path) -> None:
    job = job_of(config(tmp_path), SLOW, *[QUICK] * 12)
    record = make_record(0, step_s=10.0, stage_s={"score reference": 4.0, "generate": 9.0})
    size_processes(job, record)
    assert processes_now(job) == {"reward_processes": 18.0}
    for _ in range(12):
        size_processes(job, record)
    assert processes_now(job) == {"reward_processes": 1.0}
    told = read_processes(job.config.run_folder)
    assert (told[0].step, told[0].what, told[0].before, told[0].number) == (7, "reward", 1, 18)
    assert (told[0].num_calls, told[0].call_s, told[0].window_s, told[0].limit_s) == (64, 0.5, 4.0, 4.0)
    assert "too few" in told[0].why
    assert "more than needed" in told[-1].why


def test_a_fixed_number_a_batched_function_and_a_step_tried_again_stay(tmp_path: Path) -> None:
    record = make_record(0, step_s=10.0)
    for reward in (PYTHON | {"workers": 1}, PYTHON | {"batched": True}):
        job = job_of(config(tmp_path, reward=reward), SLOW)
        assert reward_is_fixed(job.config)
        size_processes(job, record)
        assert processes_now(job) == {"reward_processes": 1.0}
    job = job_of(config(tmp_path), SLOW)
    job.again = True
    size_processes(job, record)
    assert processes_now(job) == {"reward_processes": 1.0}
    assert read_processes(job.config.run_folder) == []


def test_calls_that_compute_leave_the_workers_their_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: set(range(8)))
    computing = CallLoad(num_calls=64, busy_s=32.0, cpu_s=32.0, longest_s=1.0)
    job = job_of(config(tmp_path, cluster={"threads": 2}), computing)
    size_processes(job, make_record(0, step_s=10.0))
    assert processes_now(job) == {"reward_processes": 3.0}  # 8 - 2 workers of 2 threads - the driver


def test_tools_are_sized_by_the_seconds_of_generation(tmp_path: Path) -> None:
    pool = Told(SLOW)
    job = job_of(config(tmp_path, tools={"function": "tool.py:f"}), QUICK, tools=pool)
    size_processes(job, make_record(0, step_s=40.0, stage_s={"generate": 16.0}))
    # two would be busy all the time; with four a call waits 43 ms in the mean (Erlang C), with five 10 ms
    assert pool.num_processes == 5
    assert processes_now(job)["tool_processes"] == 5.0
    fixed = Told(SLOW)
    job = job_of(config(tmp_path, tools={"function": "t.py:f", "workers": 2}), QUICK, tools=fixed)
    size_processes(job, make_record(0, step_s=40.0))
    assert fixed.num_processes == 1


def test_rewards_are_hidden_by_what_runs_beside_them(tmp_path: Path) -> None:
    record = make_record(0, stage_s={"generate": 9.0, "score reference": 2.0, "score values": 3.0})
    assert hidden_s(config(tmp_path), record) == 3.0
    assert hidden_s(config(tmp_path, algorithm={"kind": "dapo"}), record) == 0.0
    ahead = config(
        tmp_path,
        asynchrony={"staleness": 1},
        cluster={"gpus": 2},
        plan={"actor_generation": {"gpus": [1]}},
    )
    assert hidden_s(ahead, record) == 9.0
