"""`calibrate` as a flow: what this machine's device and links take, with its table as an artifact."""

from __future__ import annotations

from pathlib import Path

import torch
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict

from nereus.planner.machine import Deviation
from nereus.planner.profile import gpu_profile
from nereus.tasks.calibrate import Calibrated, calibrate_machine, load_average


class Machine(BaseModel):
    """Which device is measured, and where its profile goes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    folder: str = "calibration"
    """Folder of the profile; a run that was stopped goes on from what it holds."""
    gpu_kind: str = "CPU"
    """The built-in kind to compare with, e.g. H200."""
    device: str = "cpu"
    """cpu or cuda."""


@flow(name="calibrate", flow_run_name="calibrate {machine.gpu_kind}")
def calibrate(machine: Machine) -> str:
    """Measure kernels and links where this runs, and write the cluster file that the planner loads.

    Args:
        machine: The device, and where its profile goes.

    Raises ConfigError for an unknown GPU kind, DataError where the folder is another machine's.
    """
    gpu_profile(machine.gpu_kind)
    logger = get_run_logger()
    done: set[str] = set()

    def watch(name: str, share: float) -> None:
        if share == 1.0 and name not in done:
            done.add(name)
            logger.info("measured %s", name)

    found = calibrate_machine(
        Path(machine.folder), torch.device(machine.device), machine.gpu_kind, watch=watch
    )
    create_markdown_artifact(
        key="calibration", markdown=page(machine.gpu_kind, found), description="measured against built-in"
    )
    return str(found.profile)


def page(gpu_kind: str, found: Calibrated) -> str:
    """The table in Markdown."""
    lines = [
        f"# {gpu_kind}, at {load_average():.1f} waiting processes a core",
        "",
        "| class | measured / built-in | spread | rows |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(one) for one in found.deviations), "", f"`{found.profile}`"])


def _row(one: Deviation) -> str:
    return f"| {one.name} | {one.factor:.3g} | {100 * one.spread:.0f} % | {one.num_rows} |"
