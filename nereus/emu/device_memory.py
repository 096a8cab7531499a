"""Peak memory of a device, with what torch does not see."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from nereus.emu.host_memory import free_host_bytes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What could still be taken of a device and of its host, of a host by all of its workers together. On a
    CPU they are one.
    """

    device_bytes: int
    host_bytes: int


def free_memory(device: torch.device) -> FreeMemory:
    """Of the device and of this host."""
    host = free_host_bytes()
    if device.type != "cuda":
        return FreeMemory(device_bytes=host, host_bytes=host)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(device_bytes=torch.cuda.mem_get_info(device)[0] + unused, host_bytes=host)
