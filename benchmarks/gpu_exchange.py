"""What one of several ranks on one GPU runs to move a training state: the executor over NCCL, and a death."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from nereus.config.environment import set_defaults
from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.executor import Executor
from nereus.emu.lanes import Lanes
from nereus.emu.rank_plan import RankPlan
from nereus.emu.store import StoreAddress
from nereus.emu.tensor import ModelSpec
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.mesh import M2nResharder, MeshMover
from nereus.emu.transport.protocol import Deadline, Receive, Send
from nereus.emu.unit import Unit
from nereus.emu.worker_process import PROCESS_DEFAULTS
from nereus.errors import TransportError
from tests.emu.states import differences, direct_state, empty_state

WATCH_S = 20.0
DEATH = 1000  # an epoch


def exchange_rank(
    rank: int, address: StoreAddress, kind: str, model: ModelSpec, plans: list[list[RankPlan]], file: str
) -> None:
    """Run plan after plan from a directly built shard; compare each new shard with a direct build.

    `plans[i][rank]` is the rank's part of the i-th. What it took goes into `file`.RANK. After the last plan
    the highest rank ends without a word while the others wait for it.
    """
    torch.set_num_threads(1)
    transport = _transport(rank, address, kind)
    executor = Executor(transport, transport.device)
    first = plans[0][rank].old
    assert first is not None, "all ranks hold a shard at first"
    state = _on(direct_state(model, first, rank), first, model, rank, transport.device)
    seconds, received, wrong = [], [], []
    for epoch, by_rank in enumerate(plans, start=1):
        plan = by_rank[rank]
        assert plan.new is not None, "all ranks hold a shard at last"
        for again in range(2):  # the first time pays for connections
            fresh = _empty(model, plan.new, rank, transport.device)
            number = 2 * epoch + again
            report = executor.run(plan, state, fresh, epoch=number, deadline=Deadline.after(WATCH_S * 3))
        seconds.append(report.move_s)
        received.append(report.received_bytes)
        wrong += differences(
            _on(fresh, plan.new, model, rank, torch.device("cpu")), direct_state(model, plan.new, rank)
        )
        state = fresh
    found: dict[str, Any] = {"seconds": seconds, "received": received, "wrong": wrong, "noticed_s": 0.0}
    torch.save(found, f"{file}.{rank}")  # the one that ends has no other time for it
    found["noticed_s"] = _outlive(transport, rank, len(plans[0]))
    torch.save(found, f"{file}.{rank}")


def mesh_rank(
    rank: int, address: StoreAddress, kind: str, model: ModelSpec, plans: list[RankPlan], file: str
) -> None:
    """Move by `nccl.m2n`, and compare with a direct build."""
    torch.set_num_threads(1)
    transport = _transport(rank, address, kind)
    plan, device = plans[rank], transport.device
    mover = MeshMover(transport.ordered, M2nResharder.load(device), Lanes.of(device))
    old = (
        None if plan.old is None else _on(direct_state(model, plan.old, rank), plan.old, model, rank, device)
    )
    new = None if plan.new is None else _empty(model, plan.new, rank, device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        mover.run(plan, old, new, epoch=1, deadline=Deadline.after(WATCH_S * 3))
        seconds.append(time.perf_counter() - start)
    wrong: list[str] = []
    if plan.new is not None and new is not None:
        here = _on(new, plan.new, model, rank, torch.device("cpu"))
        wrong = differences(here, direct_state(model, plan.new, rank))
    torch.save({"seconds": min(seconds), "wrong": wrong}, f"{file}.{rank}")
    transport.close(1)


def _transport(rank: int, address: StoreAddress, kind: str) -> CollectiveTransport:
    set_defaults({**PROCESS_DEFAULTS, "NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return CollectiveTransport.connect(address, worker=rank, device=device)


def _outlive(transport: CollectiveTransport, rank: int, ranks: int) -> float:
    """Seconds until this rank knows that the last one has died; the last one dies."""
    deadline = Deadline.after(WATCH_S)
    channel = transport.open(range(ranks), epoch=DEATH, digest="death", deadline=deadline)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8, device=transport.device)
    peers = [peer for peer in range(ranks) if peer != rank]
    lanes = Lanes.of(transport.device)
    for pending in channel.post([*(Receive(p, buffer) for p in peers), *(Send(p, buffer) for p in peers)]):
        lanes.wire.land(pending, deadline)
    channel.settle(deadline, lanes.end())
    if rank == ranks - 1:
        os._exit(0)
    start = time.perf_counter()
    try:
        for pending in channel.post([Receive(ranks - 1, buffer)]):
            lanes.wire.land(pending, deadline)
        channel.settle(deadline, lanes.end())
    except TransportError:
        pass
    else:
        raise AssertionError("a rank received from one that is dead")
    noticed_s = time.perf_counter() - start
    transport.close(DEATH, broken=True)
    return noticed_s


def _empty(model: ModelSpec, unit: Unit, rank: int, device: torch.device) -> ShardState:
    shape = empty_state(model, unit, rank, allocated=False).shard
    kinds: dict[str, torch.dtype] = {kind.name: TORCH_DTYPE[kind.dtype] for kind in unit.kinds}
    return ShardState.empty(shape, kinds, device)


def _on(state: ShardState, unit: Unit, model: ModelSpec, rank: int, device: torch.device) -> ShardState:
    """The same numbers on another device."""
    out = _empty(model, unit, rank, device)
    for kind, arena in out.arenas.items():
        arena.flat.copy_(state[kind].flat)
    return out
