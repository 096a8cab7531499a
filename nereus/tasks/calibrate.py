"""Calibrate: measure this machine class by class, fit, and write what the planner loads.

`measured.json` holds the classes that are finished, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nereus.emu.probes.kernels import (
    HEAD_DIM,
    Columns,
    Told,
    probe_context_attention,
    probe_decode_attention,
    probe_gemm,
    probe_launch,
    probe_memory,
)
from nereus.emu.probes.links import group_sizes, probe_links
from nereus.errors import DataError, explain
from nereus.planner.machine import (
    Deviation,
    builtin_link,
    deviations,
    fitted_link,
    fitted_table,
    precision_of,
    write_profile,
)
from nereus.planner.profile import GpuProfile, gpu_profile

MEASURED_FILE = "measured.json"
Probe = Callable[[torch.device, Told], Columns]
Watch = Callable[[str, float], None]
"""Told the class that is measured, and which share of it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: the largest sizes, and the seconds that one shape is repeated for."""

    largest_product: int
    longest: int
    budget_s: float
    largest_message: int


FULL_GPU = Effort(largest_product=8192, longest=8192, budget_s=0.02, largest_message=1 << 26)
FULL_CPU = Effort(largest_product=1024, longest=1024, budget_s=0.02, largest_message=1 << 23)
QUICK = Effort(largest_product=128, longest=64, budget_s=0.0, largest_message=1 << 14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What calibration left: the cluster file, and how far the built-in table was from each class."""

    profile: Path
    deviations: tuple[Deviation, ...]
    kept: tuple[str, ...]
    """Classes that an earlier run had finished."""


def probes(effort: Effort) -> Mapping[str, Probe]:
    """The classes in the order in which they are measured."""
    sizes = tuple(1 << power for power in (10, 14, 17, 20, 23, 26) if 1 << power <= effort.largest_message)
    return {
        "launch": probe_launch,
        "memory": lambda device, told: probe_memory(device, told, budget_s=10 * effort.budget_s),
        "gemm": lambda device, told: probe_gemm(
            device, told, largest=effort.largest_product, budget_s=effort.budget_s
        ),
        "context_attention": lambda device, told: probe_context_attention(
            device, told, longest=effort.longest, budget_s=effort.budget_s
        ),
        "decode_attention": lambda device, told: probe_decode_attention(
            device, told, longest=2 * effort.longest, budget_s=effort.budget_s
        ),
        "links": lambda device, told: probe_links(device, told, sizes=sizes),
    }


def measure(
    folder: Path, device: torch.device, gpu_kind: str, effort: Effort, watch: Watch
) -> tuple[dict[str, Columns], tuple[str, ...]]:
    """Measure what `folder` does not hold yet; returns all rows, and the classes that it held.

    Raises DataError where the folder holds another device's rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MEASURED_FILE
    what = {"device": device.type, "gpu_kind": gpu_kind, "torch": torch.__version__}
    found = _held(path, what)
    kept = tuple(found)
    for name, probe in probes(effort).items():
        if name not in found:
            found[name] = probe(device, lambda share, name=name: watch(name, share))  # type: ignore[misc]
            draft = path.with_suffix(".tmp")
            draft.write_text(json.dumps({"what": what, "classes": found}))
            draft.replace(path)
        watch(name, 1.0)
    return found, kept


def calibrate_machine(
    folder: Path, device: torch.device, gpu_kind: str, *, effort: Effort | None = None, watch: Watch
) -> Calibrated:
    """Measure, fit and write `profile.yaml` into `folder`.

    Raises DataError as `measure` does, ConfigError for an unknown GPU kind.
    """
    builtin = gpu_profile(gpu_kind)
    chosen = effort or (FULL_GPU if device.type == "cuda" else FULL_CPU)
    # One thread a worker is what a campaign's logical GPU has.
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        measured, kept = measure(folder, device, gpu_kind, chosen, watch)
    finally:
        torch.set_num_threads(threads)
    precision = precision_of(device.type)
    gpu = replace(builtin, memory_bytes=_memory_bytes(builtin, device))
    table = fitted_table(gpu, measured, precision, HEAD_DIM)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else max(group_sizes(device))
    profile = write_profile(
        folder, gpu, num_gpus, table, fitted_link(builtin_link(builtin), measured["links"])
    )
    return Calibrated(
        profile=profile,
        deviations=deviations(builtin, builtin_link(builtin), measured, precision, HEAD_DIM),
        kept=kept,
    )


def _memory_bytes(builtin: GpuProfile, device: torch.device) -> int:
    """The device's own memory; a logical GPU on a CPU has what the built-in profile says."""
    if device.type == "cpu":
        return builtin.memory_bytes
    return int(torch.cuda.get_device_properties(device).total_memory)


def _held(path: Path, what: Mapping[str, str]) -> dict[str, Columns]:
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text())
        held, classes = tree["what"], dict(tree["classes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(explain(f"cannot read {path}", values=repr(error), remedy="delete it")) from error
    if held != what:
        raise DataError(
            explain(
                f"cannot go on with {path}",
                values=f"it holds rows of {held}, this is {dict(what)}",
                rule="one folder is one machine's",
                remedy="give another folder, or delete the file",
            )
        )
    return classes


def load_average() -> float:
    """Processes that want to run, over the last minute, for each core: what a measurement on a CPU shares."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)
