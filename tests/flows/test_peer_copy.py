"""The node of a model's last replica is lost: the job goes on from the copy in a peer's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.emergencies import EmergencyRecord, Way, read_emergencies
from nereus.record.metrics import read_records
from nereus.record.step import StepRecord
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.striker import Striker

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]

PARTS = {
    "cluster": {"gpus": 4, "device": "cpu", "timeout_s": 60},
    "plan": {"actor_training": {"tp": 2}, "actor_generation": {"dp": 2, "gpus": [2, 3]}},
    "tracking": "step",
    "steps": 6,
}
STRUCK = 5


def _struck(config: CampaignConfig) -> tuple[list[StepRecord], list[EmergencyRecord]]:
    """Run on two logical nodes of two GPUs; the one with the only training unit is lost in generation."""
    victims = [0, 1]
    with open_job(prepare_campaign(config), resume=False) as job:
        job.cluster._nodes = {rank: f"node {rank // 2}" for rank in job.cluster.ranks}

        def strike(step: int, stage: str) -> None:
            if (step, stage) == (STRUCK, "generate"):
                while victims:
                    ray.kill(job.cluster._actors[victims.pop()])

        job.listener = Striker(strike)
        run_steps(job)
        assert not victims
        assert job.cluster.ranks == (2, 3)
    return read_records(job.log.path), read_emergencies(config.run_folder)


@pytest.mark.slow
def test_the_last_replica_comes_back_from_a_peer_with_fewer_steps_redone_than_from_disk(
    make_config: Make,
) -> None:
    still = read_records(campaign(make_config(name="still", **PARTS)).metrics)
    disk, peers = {"every_steps": 2}, {"every_steps": 2, "peer_copy_steps": 5}
    by_disk, (from_disk,) = _struck(make_config(name="stored", checkpoint=disk, **PARTS))
    by_copy, (from_peer,) = _struck(make_config(name="copied", checkpoint=peers, **PARTS))
    assert (from_disk.way, from_disk.gone, from_disk.steps_redone) == (Way.STORAGE, [0, 1], 1)
    assert (from_peer.way, from_peer.gone, from_peer.steps_redone) == (Way.PEER_COPY, [0, 1], 0)
    for records in (by_copy, by_disk):
        assert [r.step for r in records] == list(range(6))
        assert [(r.version, r.epoch, r.position) for r in records] == [
            (r.version, r.epoch, r.position) for r in still
        ]
        assert [r.response_tokens for r in records] == [r.response_tokens for r in still]
        # Another layout sums in another order; everything else is the same.
        assert [r.stats["loss/actor"] for r in records] == pytest.approx(
            [r.stats["loss/actor"] for r in still], abs=1e-4
        )


@pytest.mark.slow
def test_a_shared_optimizer_survives_the_loss_of_a_unit_by_its_copy(make_config: Make) -> None:
    parts = PARTS | {
        "plan": {"actor_training": {"dp": 2, "gpus": [0, 2]}, "actor_generation": {"dp": 2, "gpus": [2, 3]}},
        "optimizer": {"zero1": True},
        "checkpoint": {"every_steps": 6, "peer_copy_steps": 5},
    }
    still = read_records(campaign(make_config(name="still", **parts)).metrics)
    records, (emergency,) = _struck(make_config(name="struck", **parts))
    assert (emergency.way, emergency.gone, emergency.steps_redone) == (Way.PEER_COPY, [0, 1], 0)
    assert [r.response_tokens for r in records] == [r.response_tokens for r in still]
    assert [r.stats["loss/actor"] for r in records] == pytest.approx(
        [r.stats["loss/actor"] for r in still], abs=1e-4
    )
