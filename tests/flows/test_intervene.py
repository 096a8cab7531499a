"""People intervene: a job is changed between two steps; a run is paused, changed, suspended, and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from prefect.settings import PREFECT_API_URL

from nereus.cli import intervene as command
from nereus.config import CampaignConfig
from nereus.config.changes import Changes
from nereus.errors import ConfigError
from nereus.flows.intervene import change, resumed_config
from nereus.flows.post_training import run_steps
from nereus.record.interventions import read_interventions
from nereus.record.metrics import read_records
from nereus.tasks.job import Job, open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.databases import on_both_databases
from tests.flows.striker import Striker, free_gpus
from tests.flows.test_deploy import post, wait_for, worker  # noqa: F401
from tests.flows.test_stops import ENDED, Held, StartWorker, busyness, family, living

pytestmark = pytest.mark.usefixtures("server")
MakeConfig = Callable[..., CampaignConfig]


def between(changes: dict[int, Changes]) -> Callable[[Job], None]:
    """Changes a job before the named steps."""

    def act(job: Job) -> None:
        if (given := changes.pop(job.state.step, None)) is not None:
            change(job, given, "pause")

    return act


@pytest.mark.usefixtures("ray_pool")
def test_a_running_job_takes_a_rate_and_a_plan_and_refuses_what_does_not_fit(make_config: MakeConfig) -> None:
    config = make_config(name="changed", steps=3, tracking="step")
    plan = {"actor_training": {"tp": 1, "dp": 2}}
    changes = {
        1: Changes.model_validate({"learning_rate": 5e-4, "steps": 4, "plan": plan}),
        2: Changes.model_validate({"plan": {"actor_training": {"tp": 64}}, "learning_rate": 1.0}),
    }
    with open_job(prepare_campaign(config), resume=False) as job:
        run_steps(job, between=between(changes))
    records = read_records(job.log.path)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.learning_rate for record in records] == [1e-3, 5e-4, 5e-4, 5e-4]
    assert records[0].plan["actor.training"].startswith("tp2 pp1 dp1")
    assert records[1].plan["actor.training"].startswith("tp1 pp1 dp2")
    taken, refused = read_interventions(config.run_folder)
    assert (taken.taken, refused.taken) == (True, False)
    assert "64" in refused.why

    goes_on = resumed_config(config)
    assert (goes_on.steps, goes_on.optimizer.learning_rate) == (4, 5e-4)
    assert goes_on.plan_at(1).actor_training.dp == 2
    edited = resumed_config(config.model_copy(update={"steps": 6}))
    assert (edited.steps, edited.optimizer.learning_rate) == (6, 5e-4), "the file was edited since"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_pool")
def test_a_job_that_adapts_gives_gpus_back_keeps_to_a_layout_and_leaves_one_out(
    make_config: MakeConfig,
) -> None:
    config = make_config(
        name="told",
        steps=6,
        tracking="step",
        plan={},
        cluster={"gpus": 4, "device": "cpu", "timeout_s": 60},
        adaptation={"policy": {"kind": "never"}},
    )
    changes = {
        1: Changes(max_gpus=2),
        3: Changes.model_validate({"plan": {"actor_training": {"tp": 2}}}),
        4: Changes(forbid=("actor.training=tp2pp1",), free=True),
        5: Changes(max_gpus=4),
    }
    free: list[float] = []
    with open_job(prepare_campaign(config), resume=False) as job:

        def look(step: int, stage: str) -> None:
            if stage == "generate":
                free.append(free_gpus())
            if starting := list(job.cluster._starting):
                ray.wait(starting, num_returns=len(starting), timeout=120)

        job.listener = Striker(look)
        run_steps(job, between=between(changes))
    records = read_records(job.log.path)
    assert [len(record.memory_bytes) for record in records][:5] == [4, 2, 2, 2, 2]
    assert free[2] == free[0] + 2, "the GPUs were freed"  # Ray counts them free a little later
    assert records[3].plan["actor.training"].startswith("tp2 pp1 dp1")
    assert not records[4].plan["actor.training"].startswith("tp2 pp1")
    assert all(record.taken for record in read_interventions(config.run_folder))


AHEAD: dict[str, Any] = {
    "asynchrony": {"staleness": 1},
    "cluster": {"gpus": 3, "device": "cpu", "timeout_s": 60},
    "plan": {"actor_training": {"tp": 2}, "actor_generation": {"gpus": [2]}},
}


@pytest.mark.slow
@on_both_databases
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("parts", [{}, AHEAD], ids=["in-turn", "ahead"])
def test_a_run_is_paused_changed_suspended_and_completes_with_every_sample_once(
    make_config: MakeConfig,
    tmp_path: Path,
    worker: StartWorker,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    parts: dict[str, Any],
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    parts = {"steps": 8, "checkpoint": {"every_steps": 100}} | parts
    held = Held(make_config, tmp_path, "never", -1, slow_s=1.0, **parts)
    name = held.config.name
    run = held.start()
    worker()
    slow_s = 60 * busyness()

    def until(done: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + slow_s
        while not done():
            assert time.monotonic() < end, what
            time.sleep(0.5)

    until(lambda: len(held.steps()) >= 1, "no step")
    post(f"/flow_runs/{run}/set_state", {"state": {"type": "PAUSED", "name": "Paused"}})
    wait_for(run, {"Pausing"} | ENDED, limit_s=slow_s)  # it still runs
    assert wait_for(run, {"Paused"} | ENDED, limit_s=slow_s) == "Paused"
    pid = int(Path(f"{held.marker}.pid").read_text())
    assert psutil.pid_exists(pid), "a paused run keeps its process and GPUs"
    paused_at = len(held.steps())
    refused = post(f"/flow_runs/{run}/resume", {"run_input": {"learning_rate": -1.0}})
    assert refused["status"] == "REJECT"
    with pytest.raises(ConfigError, match="learning_rate"):
        command.resume(name, ["learning_rate=nought"])
    command.resume(name, ["learning_rate=5e-4"])
    until(lambda: len(held.steps()) > paused_at, "no step after the pause")

    pids = family(pid)
    command.suspend(run)
    assert wait_for(run, {"Suspended"} | ENDED, limit_s=slow_s) == "Suspended"
    _, alive = psutil.wait_procs(living(pids), timeout=slow_s)
    assert not alive, "a suspended run holds nothing"
    suspended_at = len(held.steps())
    assert suspended_at < 8
    plan = ["plan.actor_training={tp: 1, dp: 2}"] + (
        ["plan.actor_generation={gpus: [2]}"] if held.config.runs_ahead else []
    )
    command.resume(name, ["steps=9", *plan])
    assert wait_for(run, ENDED, limit_s=3 * slow_s) == "Completed"

    records = read_records(held.config.run_folder / "metrics.jsonl")
    assert [record.step for record in records] == list(range(9))
    assert [(record.epoch, record.position) for record in records] == [
        divmod(4 * (step + 1), 6) for step in range(9)
    ], "every prompt in turn, none twice"
    if held.config.asynchrony is None:
        assert [record.version for record in records] == list(range(9))
    assert {record.learning_rate for record in records[paused_at:]} == {5e-4}
    assert records[suspended_at].plan["actor.training"].startswith("tp1 pp1 dp2")
    kinds = [
        (record.kind, record.taken, bool(record.waits))
        for record in read_interventions(held.config.run_folder)
    ]
    assert kinds == [("pause", True, False), ("suspend", False, True), ("suspend", True, False)]
