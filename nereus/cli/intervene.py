"""`nereus pause | suspend | resume`: intervene in a campaign that runs, over its Prefect server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from nereus.config.environment import prefect_api_url
from nereus.errors import ConfigError, explain

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

Run = Annotated[
    str,
    typer.Argument(help="The campaign's name, or the id of its flow run.", show_default=False),
]


def pause(run: Run) -> None:
    """Pause a campaign before its next step; it keeps its GPUs and waits for `nereus resume`."""
    _ask(run, "pause")


def suspend(run: Run) -> None:
    """Suspend a campaign before its next step: it saves a checkpoint, frees its GPUs and ends.

    `nereus resume` runs it again, in a worker of its work pool; it goes on from the checkpoint.
    """
    _ask(run, "suspend")


def resume(
    run: Run,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="What changes from here on: learning_rate, steps, max_gpus, plan, forbid, free.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Resume a paused or suspended campaign, changed or as it was.

    The changes are those of the form that the Prefect UI shows; they are checked before anything is resumed.
    """
    from nereus.config.changes import read_changes

    values = read_changes(changes or ()).model_dump(mode="json", exclude_defaults=True)
    with _client() as client:
        found = _find(client, run, {"PAUSED"})
        answer = client.resume_flow_run(found.id, run_input=values)
    if answer.status.value != "ACCEPT":
        reason: Any = answer.details
        raise ConfigError(
            explain(
                f"cannot resume {found.name}",
                values=str(reason.reason),
                rule="the form of the pause decides what may be given",
            )
        )
    typer.echo(f"{found.name}: resumed" + (f" with {values}" if values else ""))


def _ask(run: str, what: str) -> None:
    from nereus.flows.requests import Asked, ask

    with _client() as client:
        found = _find(client, run, {"RUNNING"})
        if what == "suspend" and found.deployment_id is None:
            raise ConfigError(
                explain(
                    f"cannot suspend {found.name}",
                    values="it was not started from a deployment",
                    rule="a suspended run is run again by a worker",
                    remedy=f"nereus pause {run}, or end it (Ctrl-C) and run it again with --resume",
                )
            )
        ask(client, found.id, Asked.PAUSE if what == "pause" else Asked.SUSPEND)
    typer.echo(f"{found.name}: asked to {what} before its next step; then: nereus resume {run} [KEY=VALUE]")


def _client() -> SyncPrefectClient:
    if prefect_api_url() is None:
        raise ConfigError(
            explain(
                "cannot reach the campaign",
                values="PREFECT_API_URL is not set, and the Prefect profile names no server",
                rule="a campaign is asked over the Prefect server that tracks it",
                remedy="export PREFECT_API_URL=http://127.0.0.1:4200/api",
            )
        )
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _find(client: SyncPrefectClient, run: str, states: set[str]) -> FlowRun:
    """The newest flow run of that name or id in one of `states`. Raises ConfigError when there is none."""
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterId,
        FlowRunFilterName,
    )
    from prefect.client.schemas.sorting import FlowRunSort

    try:
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run)]))
    except ValueError:
        wanted = FlowRunFilter(name=FlowRunFilterName(any_=[run]))
    runs = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["campaign"])),
        flow_run_filter=wanted,
        sort=FlowRunSort.START_TIME_DESC,
        limit=20,
    )
    for found in runs:
        if found.state is not None and found.state.type.value in states:
            return found
    known = (
        ", ".join(f"{one.name} is {one.state_name}" for one in runs[:3]) or "no campaign has that name or id"
    )
    raise ConfigError(
        explain(
            f"cannot find {run}",
            values=known,
            rule=f"it must be {' or '.join(sorted(states)).lower()}",
        )
    )
