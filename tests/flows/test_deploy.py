"""Deployments on a real Prefect server: made once, updated after, run by a worker, waiting for their GPUs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from nereus.cli.deploy import seconds
from nereus.config import CampaignConfig
from nereus.errors import ConfigError
from nereus.flows.deployments import POOL, Deployed, common, scheduled
from nereus.flows.register import Change, register
from nereus.record.listener import NullListener, current_listener
from nereus.record.metrics import read_records
from nereus.tasks.gpu_limit import gpus_held
from tests.flows.databases import on_both_databases

pytestmark = [pytest.mark.usefixtures("server"), on_both_databases]
MakeConfig = Callable[..., CampaignConfig]


def put(*deployments: Deployed, gpus: int | None = None, dry_run: bool = False) -> list[Change]:
    return list(register((*common(), *deployments), gpu_limit="nereus-gpus", num_gpus=gpus, dry_run=dry_run))


def test_a_dry_run_says_what_it_would_make_and_makes_nothing(make_config: MakeConfig) -> None:
    chosen = scheduled(make_config(name="dry"), cron=None, interval_s=None, max_steps=None)
    first, second = (put(chosen, gpus=3, dry_run=True) for _ in range(2))
    assert first == second
    assert ("deployment", "campaign/dry", "create") in {(c.kind, c.name, c.action) for c in first}


def test_deploying_twice_leaves_one_of_each_and_keeps_what_the_user_enabled(make_config: MakeConfig) -> None:
    chosen = scheduled(make_config(name="nightly"), cron="0 2 * * *", interval_s=None, max_steps=5)
    put(chosen, gpus=8)
    with get_client(sync_client=True) as client:
        template = client.read_automations_by_name("nereus: start when GPUs appear")[0]
        assert not template.enabled
        client.resume_automation(template.id)
    again = put(chosen, gpus=6)
    with get_client(sync_client=True) as client:
        assert client.read_global_concurrency_limit_by_name("nereus-gpus").limit == 6
        names = [automation.name for automation in client.read_automations()]
        assert len(names) == len(set(names))
        assert client.read_automations_by_name("nereus: start when GPUs appear")[0].enabled
        deployment = client.read_deployment_by_name("campaign/nightly")
        client.pause_automation(template.id)
        client.delete_global_concurrency_limit_by_name("nereus-gpus")
    assert deployment.schedules[0].schedule.cron == "0 2 * * *"  # type: ignore[union-attr]
    assert deployment.parameters["continuing"] is True
    assert deployment.parameters["max_steps"] == 5
    actions = {(change.kind, change.name): change.action for change in again}
    assert actions["work pool", POOL] == "keep"
    assert actions["GPU limit", "nereus-gpus"] == "update"
    assert actions["deployment", "campaign/nightly"] == "update"


def test_a_campaign_waits_for_gpus_that_another_one_holds_and_says_so(make_config: MakeConfig) -> None:
    config = make_config(name="waits", cluster={"gpus": 3, "device": "cpu", "gpu_limit": "shared"})
    said: list[str] = []

    class Listener(NullListener):
        def on_message(self, text: str) -> None:
            said.append(text)

    order: list[str] = []
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name("shared", 4)

    def second() -> None:
        current_listener.set(Listener())
        with gpus_held(config):
            order.append("second")

    patch = pytest.MonkeyPatch()
    patch.setattr("nereus.tasks.gpu_limit.ASK_AGAIN_S", 1.0)
    with gpus_held(config):
        waiter = threading.Thread(target=second)
        waiter.start()
        end = time.monotonic() + 30
        while not said and time.monotonic() < end:
            time.sleep(0.1)
        order.append("first")
    waiter.join(60)
    patch.undo()
    assert order == ["first", "second"]
    assert said[0] == "waiting for 3 GPUs: 3 of 4 of shared are in use"


def test_a_campaign_larger_than_the_limit_is_refused_with_the_remedy(make_config: MakeConfig) -> None:
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name("small", 2)
    config = make_config(cluster={"gpus": 3, "device": "cpu", "gpu_limit": "small"})
    with pytest.raises(ConfigError, match="nereus deploy --gpus 3"), gpus_held(config):
        pass


@pytest.mark.parametrize("text", ["6", "x", "10s", "h", "400d", "-3h"])
def test_an_interval_that_cannot_be_read_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--every 6h"):
        seconds(text)


def test_intervals_are_read_in_every_unit() -> None:
    assert [seconds(text) for text in ("90s", "30m", "6h", "1d")] == [90, 1800, 21600, 86400]


# ------------------------------------------------------------------------------------- with a real worker


def post(path: str, body: dict[str, Any]) -> Any:
    """Ask the server over REST; again while it says that it is busy, as its own client does."""
    request = urllib.request.Request(
        f"{PREFECT_API_URL.value()}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > end:
                raise
            time.sleep(1)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts process workers of the pool; those that live are ended by their pid."""
    started: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }

    def start() -> subprocess.Popen[bytes]:
        log = (tmp_path / f"worker{len(started)}.log").open("wb")
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def state_of(run_id: str) -> str:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state  # type: ignore[arg-type]
    return "" if state is None else state.name


def wait_for(run_id: str, names: set[str], *, limit_s: float) -> str:
    end = time.monotonic() + limit_s
    while (name := state_of(run_id)) not in names:
        assert time.monotonic() < end, f"still {name} after {limit_s:.0f} s"
        time.sleep(0.5)
    return name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_started_over_rest_trains_and_the_next_one_continues(
    make_config: MakeConfig, worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    config = make_config(name="rest", steps=4)
    put(scheduled(config, cron=None, interval_s=None, max_steps=2))
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("campaign/rest").id
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(f"/deployments/{deployment}/create_flow_run", {"parameters": {"max_steps": "many"}})
    assert b"max_steps" in refused.value.read()
    worker()
    for steps in (2, 4):
        run = post(f"/deployments/{deployment}/create_flow_run", {})
        final = wait_for(run["id"], {"Completed", "Failed", "Crashed"}, limit_s=240)
        assert final == "Completed"
        records = read_records(config.run_folder / "metrics.jsonl")
        assert [record.step for record in records] == list(range(steps))


def runs_of(deployment: object, *states: str) -> list[dict[str, Any]]:
    """The runs of a deployment that are in one of the states."""
    wanted = {"deployment_id": {"any_": [str(deployment)]}, "state": {"name": {"any_": list(states)}}}
    found: list[dict[str, Any]] = post("/flow_runs/filter", {"flow_runs": wanted})
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_schedule_fires_and_its_runs_go_on_until_all_steps_are_done(
    make_config: MakeConfig, worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    config = make_config(name="hourly", steps=4)
    put(scheduled(config, cron=None, interval_s=10.0, max_steps=2))
    worker()
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("campaign/hourly").id
        end = time.monotonic() + 400
        while len(runs_of(deployment, "Completed")) < 3:
            assert not runs_of(deployment, "Failed", "Crashed")
            assert time.monotonic() < end, "too few runs"
            time.sleep(1)
        done = sorted(runs_of(deployment, "Completed"), key=lambda run: run["start_time"])
        client.delete_deployment(deployment)
    assert all(run["auto_scheduled"] for run in done)
    for earlier, later in itertools.pairwise(done):
        assert later["start_time"] >= earlier["end_time"], "one at a time"
    assert [record.step for record in read_records(config.run_folder / "metrics.jsonl")] == [0, 1, 2, 3]
