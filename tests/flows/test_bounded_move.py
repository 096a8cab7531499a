"""Without room for old and new shards at once a job moves in bounded mode, and nothing differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import ray

from nereus.config import CampaignConfig
from nereus.emu.cluster import Call
from nereus.flows.campaign import campaign
from nereus.flows.post_training import run_steps
from nereus.record.emergencies import Way, read_emergencies
from nereus.record.metrics import read_records
from nereus.record.transitions import read_transitions
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.curves import same_steps

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
Make = Callable[..., CampaignConfig]
CLUSTER = {"gpus": 6, "device": "cpu", "timeout_s": 60}
GENERATION = {"dp": 1, "gpus": [5]}


def _parts(gpus: list[int]) -> dict[str, Any]:
    return {
        "plan": {"actor_training": {"tp": 2, "dp": 2, "gpus": gpus}, "actor_generation": GENERATION},
        "tracking": "step",
        "checkpoint": {"every_steps": 0},
        "steps": 3,
    }


@pytest.mark.slow
def test_where_every_unit_changes_one_replica_waits_for_a_second_transition(make_config: Make) -> None:
    """A training rank holds 0.13 MB, then 0.26 MB; both at once, with what is on the way, take 0.53 MB."""
    change = {"before_step": 1, "plan": {"actor_training": {"dp": 4}, "actor_generation": GENERATION}}
    ample = make_config(name="ample", changes=[change], cluster=CLUSTER, **_parts([0, 1, 2, 3]))
    tight = make_config(
        name="tight", changes=[change], cluster=CLUSTER | {"gpu_memory_gb": 5e-4}, **_parts([0, 1, 2, 3])
    )
    undisturbed = read_records(campaign(ample).metrics)
    same_steps(read_records(campaign(tight).metrics), undisturbed, within=1e-4)
    (shadow,) = read_transitions(ample.run_folder)
    assert (shadow.bounded, shadow.halfway) == ([], False)
    first, second = read_transitions(tight.run_folder)
    assert [(r.outcome, r.bounded, r.halfway) for r in (first, second)] == [
        ("commit", ["actor.training"], True),
        ("commit", ["actor.training"], False),
    ]
    assert first.after["actor.training"] == "tp2 pp1 dp1 on 0,1 and tp1 pp1 dp2 on 2,3"
    for record in (first, second):
        assert sum(operation.bytes for operation in record.operations) == record.bytes == record.lower_bound


@pytest.mark.slow
def test_a_move_that_fits_in_no_mode_is_not_made(make_config: Make) -> None:
    change = {"before_step": 1, "plan": {"actor_training": {"dp": 4}, "actor_generation": GENERATION}}
    config = make_config(
        name="short", changes=[change], cluster=CLUSTER | {"gpu_memory_gb": 3e-4}, **_parts([0, 1, 2, 3])
    )
    records = read_records(campaign(config).metrics)
    assert {record.plan["actor.training"] for record in records} == {"tp2 pp1 dp2 on 0,1,2,3"}
    assert read_transitions(config.run_folder) == []


@pytest.mark.slow
def test_a_worker_that_dies_in_a_bounded_move_costs_no_sample(make_config: Make) -> None:
    change = {
        "before_step": 1,
        "plan": {"actor_training": {"tp": 2, "dp": 2, "gpus": [0, 1, 2, 4]}, "actor_generation": GENERATION},
    }
    still = make_config(name="still", cluster=CLUSTER, **_parts([0, 1, 2, 3]))
    config = make_config(
        name="struck", changes=[change], cluster=CLUSTER | {"gpu_memory_gb": 2.3e-4}, **_parts([0, 1, 2, 3])
    )
    victims = [4]
    with open_job(prepare_campaign(config), resume=False) as job:
        submit = job.cluster.submit

        def strike(calls: Mapping[int, Call]) -> Any:
            """Kill the worker that joins once the decision is on its way."""
            sent = submit(calls)
            if any(call.method == "apply_decision" for call in calls.values()) and victims:
                ray.kill(job.cluster._actors[victims.pop()])
            return sent

        job.cluster.submit = strike  # type: ignore[method-assign]
        run_steps(job)
        assert job.cluster.ranks == (0, 1, 2, 3, 5)
    moved = read_transitions(config.run_folder)[0]
    assert (moved.outcome, moved.bounded, moved.halfway) == ("commit", ["actor.training"], False)
    (emergency,) = read_emergencies(config.run_folder)
    assert (emergency.gone, emergency.way, emergency.steps_redone) == ([4], Way.TRANSITION, 0)
    same_steps(read_records(job.log.path), read_records(campaign(still).metrics), within=1e-4)
