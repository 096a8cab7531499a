"""Peak memory of a device, with what torch does not see."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")


def take_peak_bytes(device: torch.device) -> int:
    """Peak memory since this was last asked; on a CPU the peak of the process so far.

    On a GPU the peak of torch's allocator, and what the device's own count (NVML's) has beyond it: contexts,
    communicators, captured graphs, other processes.
    """
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    outside_bytes = max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device))
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak_bytes + outside_bytes


def free_bytes(device: torch.device) -> int | None:
    """Memory that could still be taken: of a GPU, or of this host for all of its workers together. None
    where the system does not tell.
    """
    if device.type == "cuda":
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused_bytes
    if not MEMINFO.exists():
        return None
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), None)
