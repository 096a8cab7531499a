"""A job that adapts, on real workers: it takes GPUs that are free, decides, moves, and survives losses."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.decisions import read_decisions
from nereus.record.emergencies import read_emergencies
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.striker import Striker

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]


def test_a_job_takes_free_gpus_moves_to_them_and_survives_the_loss_of_one(make_config: Make) -> None:
    still = campaign(make_config(name="still", steps=7, plan={}, tracking="step"))
    config = make_config(
        name="adaptive",
        steps=7,
        tracking="step",
        cluster={"gpus": 2, "max_gpus": 4, "device": "cpu", "timeout_s": 60},
        adaptation={"policy": {"kind": "any_gain"}},
    )
    with open_job(prepare_campaign(config), resume=False) as job:

        def strike(step: int, stage: str) -> None:
            if stage != "generate":
                return
            if starting := list(job.cluster._starting):  # they come up beside the step, which here is short
                ray.wait(starting, num_returns=len(starting), timeout=120)
            if step == 4 and 3 in job.cluster.ranks:
                ray.kill(job.cluster._actors[3])

        job.listener = Striker(strike)
        run_steps(job)

    records = read_records(job.log.path)
    gpus = [len(record.memory_bytes) for record in records]
    assert gpus[0] == 2
    assert max(gpus) == 4
    assert gpus[4] == 3
    assert gpus[6] == 4  # another GPU was free, and took the place of the one that was lost
    assert "worker 3" not in records[6].memory_bytes
    assert [record.step for record in records] == list(range(7))
    transitions = read_transitions(config.run_folder)
    assert len(transitions) >= 2
    assert all(record.outcome == "commit" for record in transitions)
    assert all(record.bytes == record.lower_bound for record in transitions)
    decisions = read_decisions(config.run_folder)
    assert any(decision["admit"] for decision in decisions)
    assert all(decision["numbers"]["new_step_s"] > 0 for decision in decisions)
    # The same prompts, and the same responses to them, as a job that never moved.
    undisturbed = read_records(still.metrics)
    assert [(r.epoch, r.position, r.version) for r in records] == [
        (r.epoch, r.position, r.version) for r in undisturbed
    ]
    assert [r.response_tokens for r in records] == [r.response_tokens for r in undisturbed]
    assert [r.reward_mean for r in records] == pytest.approx([r.reward_mean for r in undisturbed], abs=1e-6)


@pytest.mark.slow
def test_a_node_that_drains_is_left_between_two_stages_and_no_stage_is_run_again(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = read_records(campaign(make_config(name="still", steps=4, plan={}, tracking="step")).metrics)
    config = make_config(
        name="drained",
        steps=4,
        tracking="step",
        cluster={"gpus": 4, "device": "cpu", "timeout_s": 60},
        adaptation={"policy": {"kind": "never"}, "drain_margin_s": 300.0},
    )
    draining: dict[str, int] = {}
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: draining)
    with open_job(prepare_campaign(config), resume=False) as job:
        job.cluster._nodes = {rank: f"node {rank // 2}" for rank in job.cluster.ranks}

        begun: list[tuple[int, str]] = []

        def strike(step: int, stage: str) -> None:
            begun.append((step, stage))
            if (step, stage) == (1, "generate"):
                draining["node 1"] = int((time.time() + 200) * 1000)

        job.listener = Striker(strike)
        run_steps(job)
    records = read_records(job.log.path)
    assert {"worker 2", "worker 3"} <= records[0].memory_bytes.keys()
    assert not {"worker 2", "worker 3"} & records[1].memory_bytes.keys()
    assert [step for step, stage in begun if stage == "generate"] == [0, 1, 2, 3]
    (transition,) = read_transitions(config.run_folder)
    assert (transition.step, transition.outcome) == (1, "commit")
    admitted = [decision for decision in read_decisions(config.run_folder) if decision["admit"]]
    assert [decision["change"]["trigger"]["cause"] for decision in admitted] == ["GPUs lost"]
    assert read_emergencies(config.run_folder) == []
    assert [r.response_tokens for r in records] == [r.response_tokens for r in still]
    assert [(r.version, r.position) for r in records] == [(r.version, r.position) for r in still]
