"""Times messages between processes of this machine: all-reduce, all-gather, and from one to another.

One process for each rank, gloo on CPUs and NCCL on GPUs, a GPU for each rank. They are of this host, so what
is timed is the link inside a node; a network takes ranks on two hosts, and is not timed here.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from nereus.emu.groups import backend_for
from nereus.emu.probes.kernels import Columns, Told

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
OPERATIONS = ("all_reduce", "all_gather", "point_to_point")
REPEATS = 7


def group_sizes(device: torch.device) -> tuple[int, ...]:
    """How many ranks the groups have: 2, 4, 8 as GPUs or cores allow; none on a machine with one GPU."""
    most = torch.cuda.device_count() if device.type == "cuda" else max(2, os.cpu_count() or 2)
    return tuple(size for size in (2, 4, 8) if size <= most)


def probe_links(
    device: torch.device, told: Told, *, sizes: tuple[int, ...] = SIZES, timeout_s: float = 120.0
) -> Columns:
    """Columns operation (index in OPERATIONS), ranks, bytes, seconds; empty where one GPU stands alone."""
    columns: Columns = {"operation": [], "ranks": [], "bytes": [], "seconds": []}
    groups = group_sizes(device)
    for number, ranks in enumerate(groups, 1):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.pt"
            arguments = (ranks, _free_port(), device.type, sizes, str(file), timeout_s)
            spawn(_rank, args=arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
            for row in torch.load(file, weights_only=True):
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(float(value))
        told(number / len(groups))
    return columns


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _rank(
    rank: int, ranks: int, port: int, kind: str, sizes: tuple[int, ...], file: str, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_for(device),
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    rows = [
        (index, ranks, size, _median_s(_operation(name, size, ranks, rank, device), device))
        for index, name in enumerate(OPERATIONS)
        for size in sizes
    ]
    if rank == 0:
        torch.save(rows, file)
    dist.barrier()
    dist.destroy_process_group()


def _operation(name: str, size: int, ranks: int, rank: int, device: torch.device) -> Callable[[], object]:
    x = torch.ones(size // 4, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(x)
    if name == "all_gather":
        part = torch.ones(max(1, size // 4 // ranks), device=device)
        parts = [torch.empty_like(part) for _ in range(ranks)]
        return lambda: dist.all_gather(parts, part)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
            dist.send(x, 0)

    return there_and_back


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    """Median over repeats at rank 0; a message that comes back counts half of that in `planner.machine`."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])
