"""`nereus run`: a campaign from its file to its results, shown while it runs."""

from __future__ import annotations

import shlex
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from nereus.cli.arguments import CampaignFile, Overrides
from nereus.cli.embedded import prepare_environment
from nereus.cli.failure import BAD_INPUT, INTERRUPTED, exit_code, show_failure
from nereus.cli.progress import Progress, duration, open_progress
from nereus.config import CampaignConfig, Tracking
from nereus.config.load import load_campaign
from nereus.errors import DataError
from nereus.record.listener import current_listener
from nereus.record.metrics import METRICS_FILE, read_records
from nereus.record.report import write_report

TRACEBACK_FILE = "traceback.txt"


def run(
    file: CampaignFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")
    ] = False,
    tracking: Annotated[
        Tracking | None,
        typer.Option(help="How much of a step the Prefect server is told; overrides the file."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write trace.json, which Perfetto opens.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the whole traceback of a failure.")
    ] = False,
) -> None:
    """Run a campaign from its YAML file.

    Writes metrics.jsonl, TensorBoard events, checkpoints, report.html and the final model to the run folder,
    OUTPUT/NAME. Without PREFECT_API_URL it brings its own Prefect server, in the run folder; without
    cluster.address, its own Ray.

    Exit codes: 0 the campaign is complete; 1 it failed; 2 the input is wrong; 130 it was interrupted.
    """
    given = [
        *(overrides or ()),
        *([f"tracking={tracking.value}"] if tracking else []),
        *(["profile=true"] if profile else []),
    ]
    config = load_campaign(file, given)
    console = Console()
    try:
        with (
            open_progress(console, name=config.name, num_steps=config.steps, quiet=quiet) as progress,
            _listening(progress),
            _termination_interrupts(),
        ):
            model = _campaign(config, progress, resume=resume)
    except (Exception, KeyboardInterrupt) as error:
        _fail(error, config, command=_resume_command(file, given), show_traceback=show_traceback)
    if not quiet:
        _show_results(console, config, model)


def _campaign(config: CampaignConfig, progress: Progress, *, resume: bool) -> Path:
    """Run the flow and return the folder of the final model. Imports torch, Ray and Prefect."""
    progress.on_message(f"{config.name}: {config.steps} steps in {config.run_folder}")
    from nereus.tasks.resume import checkpoint_in_folder
    from nereus.tasks.stages import read_models, stages_under

    # A wrong model, layout or folder is told in seconds, before a server is started.
    stages_under(config, config.plan, read_models(config))
    checkpoint_in_folder(config, resume=resume)
    progress.on_message(f"connecting to {prepare_environment(config.run_folder)}")
    from nereus.flows.campaign import campaign

    return campaign(config, resume=resume).model


@contextmanager
def _listening(progress: Progress) -> Iterator[None]:
    token = current_listener.set(progress)
    try:
        yield
    finally:
        current_listener.reset(token)


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM, a job queue's way to stop a job, ends the run as Ctrl-C does: orderly."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(error: BaseException, config: CampaignConfig, *, command: str, show_traceback: bool) -> NoReturn:
    """Keep what there is, say what happened and how to go on, and exit."""
    console = Console(stderr=True)
    code = exit_code(error)
    if show_traceback:
        console.print(
            "".join(traceback.format_exception(error)), markup=False, highlight=False, soft_wrap=True
        )
    if code == INTERRUPTED:
        console.print("[bold]interrupted[/bold]")
    else:
        show_failure(error, console=console)
    if code != BAD_INPUT:
        _say(console, _what_is_left(error, config, command))
    raise typer.Exit(code) from None


def _what_is_left(error: BaseException, config: CampaignConfig, command: str) -> list[str]:
    """Lines about traceback, report and checkpoint of a run that ended early."""
    from nereus.emu.checkpoint.folder import latest
    from nereus.tasks.resume import checkpoints_folder

    lines = []
    folder = config.run_folder
    if folder.is_dir() and exit_code(error) != INTERRUPTED:
        path = folder / TRACEBACK_FILE
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        lines.append(f"traceback:  {path}")
    if (folder / METRICS_FILE).exists():
        try:
            lines.append(f"report:     {write_report(folder, config)}")
        except DataError as damage:  # the failure that ended the run matters more
            lines.append(f"no report:  {damage}")
    checkpoint = latest(checkpoints_folder(config))
    if checkpoint is None:
        lines.append("There is no checkpoint yet: the next run starts from the beginning.")
    else:
        lines += [f"checkpoint: {checkpoint}", f"continue:   {command}"]
    return lines


def _resume_command(file: Path, overrides: Sequence[str]) -> str:
    return shlex.join(["nereus", "run", str(file), *overrides, "--resume"])


def _show_results(console: Console, config: CampaignConfig, model: Path) -> None:
    folder = config.run_folder
    records = read_records(folder / METRICS_FILE)
    first, last = records[0], records[-1]
    tokens = sum(record.prompt_tokens + record.response_tokens for record in records)
    total_s = sum(record.step_s for record in records)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if first.reward_mean is not None and last.reward_mean is not None:
        table.add_row("reward", f"{first.reward_mean:.4g} → {last.reward_mean:.4g}")
    table.add_row("length", f"{first.length_mean:.1f} → {last.length_mean:.1f} tokens")
    table.add_row("time", f"{duration(total_s)} in {len(records)} steps, {tokens / total_s:,.0f} tokens/s")
    if missing := sum(record.num_missing_rewards for record in records):
        table.add_row("missing rewards", str(missing))
    console.print(table)
    _say(
        console,
        [
            f"model:       {model}",
            f"report:      {folder / 'report.html'}",
            f"metrics:     {folder / METRICS_FILE}",
            f"tensorboard: tensorboard --logdir {folder}",
        ],
    )


def _say(console: Console, lines: Sequence[str]) -> None:
    """Print lines whole: a path that is wrapped cannot be copied."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
