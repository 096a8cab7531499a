"""Checks of the hardware: GPUs, cores, memory, disks, open files."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pynvml

from nereus.cli.check import Check, Verdict
from nereus.config.environment import environment_folder
from nereus.emu.host_memory import free_host_bytes

GIB = 2**30
MIN_MEMORY_BYTES = 4 * GIB  # driver, Prefect's server, Ray and two small workers: about 0.4 GiB each
MIN_DISK_BYTES = 5 * GIB
RAY_FULL_SHARE = 0.95  # above it Ray refuses to store objects
MIN_OPEN_FILES = 4096
MIN_SHARED_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What NVML says of a GPU."""

    name: str
    total_bytes: int
    free_bytes: int


def check_machine(gpus: list[Gpu], *, torch_build: str | None, run_folder: Path) -> list[Check]:
    """Everything about the hardware that matters to a run below `run_folder`."""
    shared = Path("/dev/shm")
    return [
        check_gpus(gpus, torch_build=torch_build),
        check_cores(os.cpu_count() or 1),
        check_memory(free_host_bytes()),
        *([check_shared_memory(shutil.disk_usage(shared).total)] if shared.is_dir() else []),
        check_disk("disk for runs", run_folder),
        check_disk("disk for Ray", Path(tempfile.gettempdir())),
        check_home(environment_folder()),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_memory_reads(Path("/proc/sys/kernel/yama/ptrace_scope")),
    ]


def find_gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            gpus.append(Gpu(name=str(name), total_bytes=int(memory.total), free_bytes=int(memory.free)))
        return gpus
    finally:
        pynvml.nvmlShutdown()


def check_gpus(gpus: list[Gpu], *, torch_build: str | None) -> Check:
    """GPUs are there, free, and usable by the installed torch."""
    if not gpus:
        remedy = "nothing, to try it: GPUs are logical then, worker processes on cores"
        return Check(subject="gpus", found="none", verdict=Verdict.note, remedy=remedy)
    found = "; ".join(
        f"{gpu.name}, {gpu.free_bytes / GIB:.0f} of {gpu.total_bytes / GIB:.0f} GiB free" for gpu in gpus
    )
    if torch_build is None:
        return Check(
            subject="gpus",
            found=found,
            verdict=Verdict.warning,
            remedy="torch is a CPU build: install one for your driver, or set cluster.device: cpu",
        )
    if busy := [i for i, gpu in enumerate(gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]:
        remedy = f"GPUs {busy} are in use by other processes: see nvidia-smi"
        return Check(subject="gpus", found=found, verdict=Verdict.warning, remedy=remedy)
    return Check(subject="gpus", found=f"{found} (torch for {torch_build})")


def check_cores(num_cores: int) -> Check:
    """Cores for the driver, the servers and the workers' Python."""
    if num_cores >= 2:
        return Check(subject="cores", found=str(num_cores))
    return Check(
        subject="cores",
        found=str(num_cores),
        verdict=Verdict.warning,
        remedy="expect long start-ups: driver, Prefect's server, Ray and the workers share one core",
    )


def check_memory(free_bytes: int) -> Check:
    """Memory for a small campaign."""
    found = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes >= MIN_MEMORY_BYTES:
        return Check(subject="memory", found=found)
    return Check(
        subject="memory",
        found=found,
        verdict=Verdict.warning,
        remedy=f"free some: a small campaign on four logical GPUs wants {MIN_MEMORY_BYTES / GIB:.0f} GiB",
    )


def check_shared_memory(total_bytes: int) -> Check:
    """Ray's object store lives in /dev/shm."""
    found = f"{total_bytes / GIB:.1f} GiB"
    if total_bytes >= MIN_SHARED_BYTES:
        return Check(subject="/dev/shm", found=found)
    remedy = "give the container more (docker run --shm-size=4g): Ray falls back to the slower disk"
    return Check(subject="/dev/shm", found=found, verdict=Verdict.warning, remedy=remedy)


def check_disk(subject: str, folder: Path) -> Check:
    """Space where `folder` is or will be."""
    usage = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists()))
    found = f"{usage.free / GIB:.0f} of {usage.total / GIB:.0f} GiB free at {folder}"
    if usage.free < MIN_DISK_BYTES:
        remedy = f"free some: less than {MIN_DISK_BYTES / GIB:.0f} GiB is soon filled by checkpoints"
        return Check(subject=subject, found=found, verdict=Verdict.warning, remedy=remedy)
    if usage.used / usage.total > RAY_FULL_SHARE:
        remedy = "free some, or point TMPDIR elsewhere: Ray stores no objects on a disk above 95 %"
        return Check(subject=subject, found=found, verdict=Verdict.warning, remedy=remedy)
    return Check(subject=subject, found=found)


def check_home(folder: Path) -> Check:
    """Calibration of earlier runs can be kept."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if os.access(place, os.W_OK):
        return Check(subject="NEREUS_HOME", found=str(folder))
    return Check(
        subject="NEREUS_HOME",
        found=f"{folder} cannot be written",
        verdict=Verdict.warning,
        remedy="set NEREUS_HOME to a folder of yours",
    )


def check_memory_reads(scope: Path) -> Check:
    """CPU workers on one host move state by reading one another's memory, or else through sockets."""
    strict = scope.is_file() and int(scope.read_text()) >= 2
    if strict:
        return Check(
            subject="reads between workers",
            found="denied: workers use sockets",
            verdict=Verdict.note,
            remedy=f"set {scope} to 1 or 0, for faster moves on CPU workers",
        )
    return Check(subject="reads between workers", found="permitted by the kernel")


def check_open_files(limit: int) -> Check:
    """Ray opens a handful of files for each worker and connection."""
    found = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return Check(subject="open files", found=found)
    return Check(
        subject="open files",
        found=found,
        verdict=Verdict.warning,
        remedy=f"raise it with `ulimit -n {2 * MIN_OPEN_FILES}` before many workers are started",
    )
