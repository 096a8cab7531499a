"""Brings a Prefect server to what `deployments` describes; a second time changes nothing but what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType

from nereus.flows.deployments import (
    ENVIRONMENT,
    POOL,
    Deployed,
    silent_runs_crash,
    start_when_gpus_appear,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing on the server, and what was (or would be) done about it."""

    kind: str
    name: str
    action: str
    detail: str = ""


def register(
    deployments: Sequence[Deployed], *, gpu_limit: str, num_gpus: int | None, dry_run: bool
) -> Iterator[Change]:
    """Make or update everything, in an order in which each finds what it needs. Yields what was done.

    With `dry_run` nothing is changed. Without `num_gpus` an existing limit is left as it is.
    """
    with get_client(sync_client=True) as client:
        yield _pool(client, dry_run)
        if num_gpus is not None:
            yield _limit(client, gpu_limit, num_gpus, dry_run)
        ids: list[UUID | None] = []
        for deployment in deployments:
            change, deployed = _deployment(client, deployment, dry_run)
            ids.append(deployed)
            yield change
        yield _automation(client, silent_runs_crash(), dry_run)
        if ids and (dry_run or ids[0] is not None):
            yield _automation(client, start_when_gpus_appear(ids[0] or UUID(int=0)), dry_run)


def _pool(client: SyncPrefectClient, dry_run: bool) -> Change:
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        if not dry_run:
            client.create_work_pool(
                WorkPoolCreate(name=POOL, type="process", description="Campaigns, as processes of a worker.")
            )
        return Change(kind="work pool", name=POOL, action="create", detail="process")
    return Change(kind="work pool", name=POOL, action="keep", detail=pool.type)


def _limit(client: SyncPrefectClient, name: str, num_gpus: int, dry_run: bool) -> Change:
    try:
        before = client.read_global_concurrency_limit_by_name(name).limit
    except ObjectNotFound:
        before = None
    if before == num_gpus:
        return Change(kind="GPU limit", name=name, action="keep", detail=f"{num_gpus} GPUs")
    if not dry_run:
        client.upsert_global_concurrency_limit_by_name(name, num_gpus)
    was = "" if before is None else f", was {before}"
    action = "create" if before is None else "update"
    return Change(kind="GPU limit", name=name, action=action, detail=f"{num_gpus} GPUs{was}")


def _deployment(client: SyncPrefectClient, wanted: Deployed, dry_run: bool) -> tuple[Change, UUID | None]:
    try:
        found: UUID | None = client.read_deployment_by_name(wanted.full_name).id
    except ObjectNotFound:
        found = None
    when = wanted.cron or (f"every {wanted.interval_s:g} s" if wanted.interval_s else "")
    change = Change(
        kind="deployment",
        name=wanted.full_name,
        action="create" if found is None else "update",
        detail=when,
    )
    if dry_run:
        return change, found
    deployment = wanted.flow.to_deployment(
        name=wanted.name,
        description=wanted.description,
        parameters=dict(wanted.parameters),
        cron=wanted.cron,
        interval=wanted.interval_s,
        concurrency_limit=1 if wanted.alone else None,
        tags=["nereus"],
        work_pool_name=POOL,
        job_variables={"env": ENVIRONMENT},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployed: UUID = deployment.apply()  # type: ignore[union-attr, assignment]
    return change, deployed


def _automation(client: SyncPrefectClient, wanted: AutomationCore, dry_run: bool) -> Change:
    found = client.read_automations_by_name(wanted.name)
    if not dry_run:
        if found:
            # Whether it is enabled, and for a template what it starts, is the user's.
            wanted = wanted.model_copy(update={"enabled": found[0].enabled})
            if not wanted.enabled or wanted.name == silent_runs_crash().name:
                client.update_automation(found[0].id, wanted)
        else:
            client.create_automation(wanted)
    on = "on" if (found[0].enabled if found else wanted.enabled) else "off"
    return Change(kind="automation", name=wanted.name, action="update" if found else "create", detail=on)
