"""Events of a job on a real server: read back, linked to step and decision, and matched by the automation."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import ray
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import EventTrigger
from prefect.events.schemas.events import Event, Resource, ResourceSpecification

from nereus.config import CampaignConfig
from nereus.flows.deployments import scheduled, start_when_gpus_appear
from nereus.flows.post_training import run_steps
from nereus.record.decisions import read_decisions
from nereus.record.transitions import read_transitions
from nereus.tasks.job import open_job
from nereus.tasks.prepare import prepare_campaign
from tests.flows.databases import on_both_databases
from tests.flows.striker import Striker
from tests.flows.test_deploy import post, put

pytestmark = pytest.mark.usefixtures("server", "ray_pool")
NOW = datetime.now(UTC)
MakeConfig = Callable[..., CampaignConfig]


def events_of(campaign: str, *names: str) -> list[dict[str, Any]]:
    """The events that name the campaign, oldest first; waits until one of each name is there."""
    related = {"labels": {"prefect.resource.id": [f"nereus.campaign.{campaign}"]}}
    end = time.monotonic() + 120
    while True:
        found = post("/events/filter", {"filter": {"related": related, "order": "ASC"}, "limit": 50})[
            "events"
        ]
        if set(names) <= {event["event"] for event in found}:
            return list(found)
        assert time.monotonic() < end, [event["event"] for event in found]
        time.sleep(0.5)


def ids(event: dict[str, Any]) -> set[str]:
    return {resource["prefect.resource.id"] for resource in event["related"]}


@pytest.mark.slow
@on_both_databases
@pytest.mark.timeout(600)
def test_gpus_that_come_are_told_and_linked_and_start_the_automations_deployment(
    make_config: MakeConfig,
) -> None:
    waiting = make_config(name="waits-for-gpus")
    put(scheduled(waiting, cron=None, interval_s=None, max_steps=None))
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("campaign/waits-for-gpus").id
        chosen = start_when_gpus_appear(deployment).model_copy(update={"enabled": True, "name": "chosen"})
        automation = client.create_automation(chosen)
    config = make_config(
        name="told-of",
        steps=3,
        plan={},
        tracking="step",
        cluster={"gpus": 1, "max_gpus": 2, "device": "cpu", "timeout_s": 60},
        adaptation={"policy": {"kind": "any_gain"}},
    )
    with open_job(prepare_campaign(config), resume=False) as job:

        def wait(step: int, stage: str) -> None:
            if starting := list(job.cluster._starting):
                ray.wait(starting, num_returns=len(starting), timeout=120)

        job.listener = Striker(wait)
        run_steps(job)
    decision = read_decisions(config.run_folder)[0]
    verdict = "nereus.plan." + ("admitted" if decision["admit"] else "rejected")
    names = ["gpu.pool.changed", verdict]
    if read_transitions(config.run_folder):
        names += ["nereus.transition.begun", "nereus.transition.committed"]
    found = events_of("told-of", *names)
    by_name = {event["event"]: event for event in reversed(found)}
    grew = by_name["gpu.pool.changed"]
    assert grew["resource"]["change"] == "grew"
    assert (grew["payload"]["by"], grew["payload"]["gpus"]) == (1, 2)
    step = decision["change"]["step"]
    assert by_name[verdict]["resource"]["prefect.resource.id"] == f"nereus.decision.told-of.{step}"
    assert by_name[verdict]["payload"]["new_step_s"] == decision["change"]["new_step_s"]
    for name in names[2:]:
        assert {f"nereus.step.told-of.{step}", f"nereus.decision.told-of.{step}"} <= ids(by_name[name])
    end = time.monotonic() + 120
    while not post("/flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [str(deployment)]}}}):
        assert time.monotonic() < end, "the automation started nothing"
        time.sleep(0.5)
    with get_client(sync_client=True) as client:
        client.delete_automation(automation)


@pytest.mark.slow
def test_a_transition_is_begun_and_committed_in_the_feed_and_shrinking_starts_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: list[Event] = []

    def keep(event: str, resource: dict[str, str], **parts: Any) -> None:
        emitted.append(Event.model_validate({"event": event, "resource": resource, "occurred": NOW, **parts}))

    monkeypatch.setattr("nereus.flows.events.emit_event", keep)
    change = {"before_step": 1, "plan": {"actor_training": {"tp": 1, "dp": 2}}}
    config = make_config(name="moved", steps=2, tracking="step", changes=[change])
    with open_job(prepare_campaign(config), resume=False) as job:
        run_steps(job)
    mine = [event for event in emitted if event.event.startswith("nereus.")]
    assert [event.event for event in mine] == ["nereus.transition.begun", "nereus.transition.committed"]
    assert mine[0].resource == mine[1].resource
    assert "nereus.step.moved.1" in {resource.id for resource in mine[1].related}
    trigger = start_when_gpus_appear(uuid4()).trigger
    assert isinstance(trigger, EventTrigger)
    match = trigger.match
    assert isinstance(match, ResourceSpecification)
    pool = {"prefect.resource.id": "gpu.pool.nereus-gpus"}
    assert match.matches(Resource.model_validate(pool | {"change": "grew"}))
    assert not match.matches(Resource.model_validate(pool | {"change": "shrank"}))
