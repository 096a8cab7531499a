"""Two campaigns share one pool: the first takes what is free, gives it to the second, and takes it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from prefect.client.orchestration import get_client

from nereus.config import CampaignConfig
from nereus.errors import ConfigError
from nereus.flows.broker import share_out
from nereus.flows.post_training import run_steps
from nereus.planner.broker import Rules
from nereus.record.metrics import read_records
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from nereus.tasks.share import gpus_shared, read_bids, read_grants
from tests.flows.striker import Striker, free_gpus

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
MakeConfig = Callable[..., CampaignConfig]
POOL = "brokered"
NUM_GPUS = 4


def sharing(make_config: MakeConfig, name: str, gpus: int, most: int, steps: int) -> CampaignConfig:
    cluster = {
        "gpus": gpus,
        "max_gpus": most,
        "device": "cpu",
        "timeout_s": 60,
        "gpu_limit": POOL,
        "broker": {},
    }
    return make_config(
        name=name,
        steps=steps,
        plan={},
        tracking="step",
        cluster=cluster,
        adaptation={"policy": {"kind": "any_gain"}},
    )


def run(config: CampaignConfig, seen: list[int], is_over: Callable[[], bool]) -> None:
    """Run a campaign's steps until it is over; `seen` gets the workers that it holds in every step."""
    with gpus_shared(config) as share, open_job(prepare_campaign(config), resume=False) as job:
        job.share = share

        def pace(step: int, stage: str) -> None:
            if stage == "generate":
                seen.append(len(job.cluster.ranks))
                time.sleep(0.5)

        job.listener = Striker(pace)
        while job.state.step < config.steps and not is_over():
            run_steps(job, job.state.step + 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_campaigns_exchange_gpus_and_never_hold_more_than_the_pool(make_config: MakeConfig) -> None:
    first = sharing(make_config, "first", 1, NUM_GPUS, 10_000)
    second = sharing(make_config, "second", 2, 2, 4)
    seen: dict[str, list[int]] = {"first": [], "second": []}
    ended, over = threading.Event(), threading.Event()
    used: list[float] = []
    base = free_gpus()

    def watch() -> None:
        while not ended.wait(0.2):
            used.append(base - free_gpus())

    rules = Rules(residence_s=1.0)
    threads = [
        threading.Thread(target=watch),
        threading.Thread(target=share_out, args=(POOL, NUM_GPUS, rules, ended)),
        threading.Thread(target=run, args=(first, seen["first"], over.is_set)),
    ]
    for thread in threads:
        thread.start()

    def until(done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 240
        while not done():
            assert time.monotonic() < end, (what, seen)
            time.sleep(0.2)

    try:
        until(lambda: NUM_GPUS in seen["first"], "the first takes what is free")
        run(second, seen["second"], lambda: False)
        given = len(seen["first"])
        assert seen["first"][-1] <= NUM_GPUS - 2
        until(lambda: NUM_GPUS in seen["first"][given:], "the first takes it back")
    finally:
        over.set()
        threads[-1].join(120)
        ended.set()
        for thread in threads:
            thread.join(30)
    assert max(used) <= NUM_GPUS
    assert set(seen["second"]) == {2}
    for config in (first, second):
        steps = [record.step for record in read_records(config.run_folder / "metrics.jsonl")]
        assert steps == list(range(len(steps)))
    with get_client(sync_client=True) as client:
        assert read_bids(client, POOL, now_s=time.time()) == []
        assert "second" not in read_grants(client, POOL)


def test_a_campaign_that_cannot_adapt_cannot_share(make_config: MakeConfig) -> None:
    config = make_config(cluster={"gpus": 2, "device": "cpu", "broker": {}})
    with pytest.raises(ConfigError, match="adaptation"), gpus_shared(config):
        pass
