"""What one of several ranks on one GPU runs; apart, so that a new process imports torch and nothing else."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def shared_rank(rank: int, ranks: int, port: int, kind: str, message: int, file: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    x = torch.full((message // 4,), float(rank + 1), device=device)
    dist.all_reduce(x)
    assert x.eq(ranks * (ranks + 1) / 2).all(), "the sum over ranks"
    dist.broadcast(x.fill_(rank), src=ranks - 1)
    assert x.eq(ranks - 1).all(), "the last rank's"
    calls = {"all-reduce": lambda: dist.all_reduce(x), "broadcast": lambda: dist.broadcast(x, src=0)}
    seconds = {}
    for name, call in calls.items():
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            call()
        if kind == "cuda":
            torch.cuda.synchronize(device)
        seconds[name] = (time.perf_counter() - start) / 5
    if rank == 0:
        torch.save(seconds, file)
    dist.barrier()
    dist.destroy_process_group()
