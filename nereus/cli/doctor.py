"""`nereus doctor`: is this machine fit to run, and if not, what to do."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nereus.cli.check import Check, Verdict, can_run
from nereus.cli.check_machine import check_machine, find_gpus
from nereus.cli.check_software import check_nccl, check_software, torch_cuda

STYLES = {Verdict.ok: "green", Verdict.note: "dim", Verdict.warning: "yellow", Verdict.failure: "bold red"}


def doctor() -> None:
    """Check this machine, and say what to do about what is missing.

    Exits with 1 only when not even a campaign on logical GPUs can run here.
    """
    console = Console()
    gpus = find_gpus()
    checks = [
        *check_software(),
        check_nccl(num_gpus=len(gpus)),
        *check_machine(gpus, torch_build=torch_cuda(), run_folder=Path.cwd()),
    ]
    console.print(as_table(checks))
    if not can_run(checks):
        console.print("[bold red]Campaigns cannot run here[/bold red]: do what the lines marked failure say.")
        raise typer.Exit(1)
    console.print("Campaigns can run here. Try: nereus run examples/count/grpo.yaml", highlight=False)


def as_table(checks: list[Check]) -> Table:
    """A line for each check."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for check in checks:
        mark = Text(check.verdict.value, style=STYLES[check.verdict])
        table.add_row(mark, Text(check.subject), Text(check.found), Text(check.remedy or "nothing"))
    return table
