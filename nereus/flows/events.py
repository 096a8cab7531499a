"""What a campaign tells the Prefect server's event feed, for automations and for whoever looks back.

    gpu.pool.changed                   workers came or went           on  gpu.pool.LIMIT
    nereus.plan.admitted | rejected    what the planner decided       on  nereus.decision.NAME.STEP
    nereus.transition.begun | committed | aborted                     on  nereus.transition.NAME.EPOCH
    nereus.intervention.taken | refused                               on  nereus.step.NAME.STEP

Every event names its campaign, its step and, where there is one, the decision behind it as related resources;
Prefect adds the flow run. Events go through a queue to a thread of Prefect's own: nothing waits for them, and
without a server they go nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from prefect.events import emit_event

from nereus.emu.layout import Rank
from nereus.planner.admission import Decision
from nereus.tasks.job import Job

POOL_CHANGED = "gpu.pool.changed"
Outcome = Literal["begun", "committed", "aborted"]


def pool_changed(job: Job, change: Literal["grew", "shrank"], ranks: Iterable[Rank], why: str) -> None:
    """Workers `ranks` came to the job or left it; the job's GPUs are counted after that."""
    moved = sorted(ranks)
    if not moved:
        return
    pool = f"gpu.pool.{job.config.cluster.gpu_limit}"
    _emit(
        job,
        POOL_CHANGED,
        {
            "prefect.resource.id": pool,
            "prefect.resource.name": job.config.cluster.gpu_limit,
            "change": change,
        },
        {"change": change, "by": len(moved), "workers": moved, "gpus": len(job.cluster.ranks), "why": why},
    )


def plan_decided(job: Job, decision: Decision) -> None:
    """The planner admitted or rejected a change before the next step."""
    verdict = "admitted" if decision.admit else "rejected"
    change = decision.change
    _emit(
        job,
        f"nereus.plan.{verdict}",
        {"prefect.resource.id": decision_id(job), "prefect.resource.name": f"before step {job.state.step}"},
        {
            "why": decision.why,
            "cause": str(change.trigger.cause),
            "old": change.old,
            "new": change.new,
            "old_step_s": change.old_step_s,
            "new_step_s": change.new_step_s,
            "transition_s": change.predicted_s,
        },
    )


def transition(job: Job, outcome: Outcome, epoch: int, text: str, numbers: Mapping[str, float]) -> None:
    """A transition began or ended."""
    resource = f"nereus.transition.{job.config.name}.{epoch}"
    named = {"prefect.resource.id": resource, "prefect.resource.name": f"before step {job.state.step}"}
    _emit(job, f"nereus.transition.{outcome}", named, {"text": text, "epoch": epoch, **numbers})


def intervened(job: Job, taken: bool, kind: str, values: Mapping[str, Any], why: str) -> None:
    """A person's changes were taken at a step boundary, or refused."""
    _emit(
        job,
        f"nereus.intervention.{'taken' if taken else 'refused'}",
        {"prefect.resource.id": step_id(job)},
        {"kind": kind, "changes": dict(values), "why": why},
    )


def step_id(job: Job) -> str:
    """The resource of the step that is next."""
    return f"nereus.step.{job.config.name}.{job.state.step}"


def decision_id(job: Job) -> str:
    """The resource of the planner's decision before the next step."""
    return f"nereus.decision.{job.config.name}.{job.state.step}"


def _emit(job: Job, event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
    related = [
        {"prefect.resource.id": f"nereus.campaign.{job.config.name}", "prefect.resource.role": "campaign"},
        {"prefect.resource.id": step_id(job), "prefect.resource.role": "step"},
    ]
    if job.decided == job.state.step:
        related.append({"prefect.resource.id": decision_id(job), "prefect.resource.role": "decision"})
    emit_event(event, resource, related=related, payload={"step": job.state.step, **payload})
