"""What `nereus deploy` puts on a Prefect server, as values: pool, GPU limit, deployments, automations.

worker process ◀─ work pool `nereus` ◀─ deployments: those of `common`, and one a scheduled campaign file
GPUs           ◀─ limit `nereus-gpus`: campaigns wait there
automations: a run whose heartbeat stopped is crashed; a campaign starts when GPUs appear (off until enabled)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from prefect import Flow
from prefect.automations import AutomationCore
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from nereus.config import CampaignConfig
from nereus.flows.broker import broker
from nereus.flows.calibrate import calibrate
from nereus.flows.campaign import campaign
from nereus.flows.events import POOL_CHANGED
from nereus.flows.plan import plan
from nereus.flows.replay import replay

POOL = "nereus"
HEARTBEAT_S = 30  # the shortest that Prefect allows
SILENCE_S = 3 * HEARTBEAT_S  # two lost heartbeats are a hiccup, three are a dead process
ENVIRONMENT = {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # nobody reads them; a cancelled run waits 5 s for them
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """One deployment of a flow."""

    flow: Flow[..., Any]
    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cron: str | None = None
    interval_s: float | None = None
    alone: bool = False
    """Whether a second run waits for the first."""

    @property
    def full_name(self) -> str:
        """As `prefect deployment run` takes it."""
        return f"{self.flow.name}/{self.name}"


def common() -> tuple[Deployed, ...]:
    """The deployments that every server has; their parameters are filled in when a run is started."""
    return (
        Deployed(
            flow=campaign,
            name="campaign",
            description="Post-train a language model. Fill in the form: models, prompts, reward, steps.",
        ),
        Deployed(flow=plan, name="plan", description="Find the fastest parallelism for a job. Needs no GPU."),
        Deployed(
            flow=replay,
            name="replay",
            description="Play a job over a trace, policy against policy. Needs no GPU.",
        ),
        Deployed(
            flow=calibrate,
            name="calibrate",
            description="Measure the machine that the worker runs on, for the planner.",
        ),
        Deployed(
            flow=broker,
            name="broker",
            description="Share GPUs out among campaigns with cluster.broker, until it is cancelled.",
            alone=True,
        ),
    )


def scheduled(
    config: CampaignConfig, *, cron: str | None, interval_s: float | None, max_steps: int | None
) -> Deployed:
    """A campaign that goes on from its last checkpoint at every run, up to `config.steps` steps in all."""
    return Deployed(
        flow=campaign,
        name=config.name,
        description=f"{config.algorithm.kind} of {config.models.actor}, {config.steps} steps in all. "
        "Every run continues from the newest checkpoint.",
        parameters={"config": config.model_dump(mode="json"), "continuing": True, "max_steps": max_steps},
        cron=cron,
        interval_s=interval_s,
        alone=True,
    )


def silent_runs_crash() -> AutomationCore:
    """A run whose process or host died says nothing; after some silence it counts as crashed.

    A crashed run can be run again from the UI; it continues from its newest checkpoint.
    """
    return AutomationCore(
        name="nereus: crash silent runs",
        description=f"A run without a heartbeat for {SILENCE_S} s is crashed, which frees its slots.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.name": campaign.name}
            ),
            after={"prefect.flow-run.heartbeat"},
            expect={
                "prefect.flow-run.heartbeat",
                "prefect.flow-run.Completed",
                "prefect.flow-run.Failed",
                "prefect.flow-run.Cancelled",
                "prefect.flow-run.Crashed",
                "prefect.flow-run.Paused",
                "prefect.flow-run.Suspended",
            },
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=SILENCE_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name=None,
                force=False,
                message=f"no heartbeat for {SILENCE_S} s: its process or host is gone. "
                "Run it again to continue.",
            )
        ],
    )


def start_when_gpus_appear(deployment_id: Any) -> AutomationCore:
    """A template, off until it is enabled: GPUs that join the cluster start the given deployment."""
    return AutomationCore(
        name="nereus: start when GPUs appear",
        description="Enable it, and choose the deployment and its parameters.",
        enabled=False,
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={POOL_CHANGED},
            match=ResourceSpecification({"change": "grew"}),
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(source="selected", deployment_id=deployment_id, parameters=None, job_variables=None)
        ],
    )
