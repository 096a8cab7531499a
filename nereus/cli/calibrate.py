"""`nereus calibrate`: measure this machine, and what a job on it has taught, for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # loaded when something is measured, so that --help is instant
    from rich.console import Console
    from rich.table import Table

    from nereus.planner.machine import Deviation
    from nereus.tasks.calibrate_job import CalibratedJob


def calibrate(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="A campaign that has run here: learn from its steps, too, and say how well they are "
            "predicted.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]", help="Values laid over the file's.", show_default=False),
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the profile.")] = Path("calibration"),
    gpu_kind: Annotated[
        str | None,
        typer.Option("--gpu-kind", help="The built-in kind to compare with; by default what is here."),
    ] = None,
) -> None:
    """Measure kernels and links of this machine, and write the cluster file that the planner loads.

    Takes about two minutes; one that was stopped goes on with the classes that it had not finished. On a CPU
    let nothing else run meanwhile. `nereus plan --cluster calibration/profile.yaml` uses the result.
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from nereus.tasks.calibrate import calibrate_machine, load_average
    from nereus.tasks.device import kind_of_device

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = gpu_kind or kind_of_device(device.type)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars = {}

        def watch(name: str, share: float) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name.replace("_", " "), total=1.0)
            progress.update(bars[name], completed=share)

        found = calibrate_machine(out, device, kind, watch=watch)
    console.print(_table(found.deviations))
    if found.kept:
        console.print(f"measured earlier: {', '.join(found.kept)}", highlight=False)
    if device.type == "cpu" and (load := load_average()) > 1:
        console.print(f"[yellow]{load:.1f} processes a core want to run: times of this CPU are too long")
    console.print(f"profile: {found.profile}", soft_wrap=True, highlight=False)
    if file is not None:
        from nereus.config.load import load_campaign
        from nereus.tasks.calibrate_job import calibrate_job

        _show_job(console, calibrate_job(load_campaign(file, overrides or ()), out, found.profile))


def _table(deviations: tuple[Deviation, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("class", no_wrap=True)
    for name in ("measured / built-in", "spread", "rows"):
        table.add_column(name, justify="right")
    for one in deviations:
        table.add_row(one.name, f"{one.factor:.3g}", f"{100 * one.spread:.0f} %", str(one.num_rows))
    return table


def _show_job(console: Console, job: CalibratedJob) -> None:
    fit = job.fit
    console.print(
        f"step time, mean error over {fit.num_steps} steps that did not teach: "
        f"{fit.built_in_error:.1f} % with the built-in profile, {fit.measured_error:.1f} % with the measured "
        f"one, {fit.learned_error:.1f} % with what the other steps taught",
        highlight=False,
    )
    console.print(f"calibration: {job.file}", soft_wrap=True, highlight=False)
