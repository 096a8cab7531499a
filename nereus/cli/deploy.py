"""`nereus deploy`: everything a Prefect server needs to run campaigns, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereus.config.environment import prefect_api_url
from nereus.errors import ConfigError, explain

if TYPE_CHECKING:
    from nereus.flows.deployments import Deployed

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

File = Annotated[
    Path | None,
    typer.Argument(
        help="A campaign to deploy under its own name, continuing at every run; without it only the common "
        "deployments are made.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value changes of the campaign.", show_default=False)
]


def deploy(
    file: File = None,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs that campaigns share: the size of the limit at which they wait.",
            show_default=False,
        ),
    ] = None,
    cron: Annotated[
        str | None, typer.Option(help='When it runs, e.g. "0 2 * * *" for nightly.', show_default=False)
    ] = None,
    every: Annotated[
        str | None, typer.Option(help="How often it runs, e.g. 6h or 30m.", show_default=False)
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of one run; all that are left by default.", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")
    ] = False,
) -> None:
    """Put campaigns on a Prefect server: work pool, GPU limit, deployments, schedules, automations.

    The server is the one of PREFECT_API_URL or of the active Prefect profile. Running it again updates what
    differs and keeps the rest. Then start a worker where the GPUs are: prefect worker start --pool nereus
    """
    url = prefect_api_url()
    if url is None:
        raise ConfigError(
            explain(
                "cannot deploy",
                values="PREFECT_API_URL is not set, and the Prefect profile names no server",
                rule="deployments live on a Prefect server that keeps running",
                remedy="prefect server start, then export PREFECT_API_URL=http://127.0.0.1:4200/api",
            )
        )
    chosen = _chosen(file, overrides, cron, every, max_steps)
    from rich.console import Console
    from rich.table import Table

    from nereus.flows.deployments import POOL, common
    from nereus.flows.register import register

    limit = "nereus-gpus"
    table = Table(
        "what", "name", "done" if not dry_run else "would be done", "", title=url, title_justify="left"
    )
    for change in register((*common(), *chosen), gpu_limit=limit, num_gpus=gpus, dry_run=dry_run):
        table.add_row(change.kind, change.name, change.action, change.detail)
    console = Console()
    console.print(table)
    if not dry_run:
        console.print(
            f"start a worker where the GPUs are: prefect worker start --pool {POOL}", highlight=False
        )


def _chosen(
    file: Path | None, overrides: list[str] | None, cron: str | None, every: str | None, max_steps: int | None
) -> tuple[Deployed, ...]:
    if file is None:
        if cron or every or max_steps:
            raise ConfigError(
                explain(
                    "cannot schedule nothing",
                    rule="--cron, --every and --max-steps belong to a campaign",
                    remedy="name its file: nereus deploy campaign.yaml --every 6h",
                )
            )
        return ()
    if cron and every:
        raise ConfigError(explain("cannot use --cron and --every together", remedy="leave one of them out"))
    interval_s = None if every is None else seconds(every)
    if cron is not None:
        _check_cron(cron)
    from nereus.config.load import load_campaign

    config = load_campaign(file, overrides or ())
    from nereus.flows.deployments import scheduled

    return (scheduled(config, cron=cron, interval_s=interval_s, max_steps=max_steps),)


def seconds(text: str) -> float:
    """Read "90s", "30m", "6h" or "1d". Raises ConfigError."""
    number, unit = text[:-1], text[-1:]
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 60 <= value <= 366 * 86400:
        raise ConfigError(
            explain(
                f"cannot read --every {text!r}",
                rule="give a number and s, m, h or d; between a minute and a year",
                remedy="for example --every 6h",
            )
        )
    return value


def _check_cron(text: str) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    try:
        CronSchedule(cron=text)
    except ValueError as error:
        raise ConfigError(
            explain(
                f"cannot read --cron {text!r}",
                values=str(error).splitlines()[-1].strip(),
                rule="five fields: minute hour day month weekday",
                remedy='for example --cron "0 2 * * *" for every night at two',
            )
        ) from error
