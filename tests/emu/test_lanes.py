"""Moves whose packing, wire and unpacking run late and interleaved are still equal bit for bit."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from nereus.emu.arena import ShardState
from nereus.emu.executor import Executor
from nereus.emu.lanes import HostLane, Lanes
from nereus.emu.rank_plan import Mode, RankPlan
from nereus.emu.reshard import Limits, ReshardPlan, plan_reshard
from nereus.emu.staging import StagingPool
from nereus.emu.transport.memory import Hub, MemoryTransport
from nereus.emu.transport.protocol import REACHED, Deadline
from tests.emu.late_device import LateDevice
from tests.emu.states import differences, direct_state, empty_state, random_kinds, random_model, random_units

RANKS = tuple(range(5))
CPU = torch.device("cpu")


def a_plan(seed: int) -> ReshardPlan:
    """Small buckets, so that there are many rounds, relays and buffers that are used again."""
    rng = random.Random(seed)
    model, kinds = random_model(rng), random_kinds(rng)
    old = random_units(rng, model, kinds, RANKS, first_index=0)
    new = random_units(rng, model, kinds, RANKS, first_index=100)
    collectives = rng.choice(["never", "always"])
    limits = Limits(bucket_bytes=2048, direct_bytes=256, relay_bytes=512, collectives=collectives)
    return plan_reshard(model, old, new, limits=limits)


def moved(plan: ReshardPlan, seed: int, *, heeds: bool = True, mode: Mode = "shadow") -> dict[int, list[str]]:
    """Run the plan, a thread a rank, each on a late device; by rank what differs from a direct build.

    The old shard is filled by the engine's lane, which need not have done so when the move begins.
    """
    hub, found, problems = Hub(), {}, []

    def run(rank: int) -> None:
        mine = plan.rank_plan(rank, mode)
        try:
            move(rank, mine)
        except Exception as error:
            problems.append(error)
            with hub.changed:
                hub.gone[1, mine.digest].add(rank)
                hub.declined[1, mine.digest][rank] = repr(error)
                hub.changed.notify_all()

    def move(rank: int, mine: RankPlan) -> None:
        device = LateDevice(seed * 100 + rank, heeds)
        executor = Executor(MemoryTransport(hub, rank), CPU, over=device.for_move)
        old: ShardState | None = None
        if mine.old is not None:
            full = direct_state(plan.model, mine.old, rank)
            old = empty_state(plan.model, mine.old, rank)
            pairs = [(full[kind].flat, old[kind].flat) for kind in old.arenas]
            device.lanes[0].copy(pairs)
        new = old if mine.new == mine.old else None
        if mine.new is not None and mine.new != mine.old:
            new = empty_state(plan.model, mine.new, rank, allocated=mode == "shadow")
        executor.run(mine, old, new, epoch=1, deadline=Deadline.after(20))
        device.drain()
        if mine.new is not None and new is not None:
            found[rank] = differences(new, direct_state(plan.model, mine.new, rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if problems:
        raise problems[0]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_late_lanes_give_the_same_bytes(seed: int) -> None:
    plan = a_plan(seed)
    found = moved(plan, seed)
    assert set(found) == {rank for unit in plan.new for rank in unit.ranks}
    assert not any(found.values()), plan.explain()


def test_without_the_waits_bytes_are_wrong() -> None:
    """The device is late enough to tell: were no lane to wait for another, most moves would fail."""
    wrong = 0
    for seed in range(6):
        try:
            wrong += any(moved(a_plan(seed), seed, heeds=False).values())
        except AssertionError:
            wrong += 1  # landed before it was posted
    assert wrong >= 4


def bounded_plan(seed: int) -> ReshardPlan:
    """One that keeps a unit and moves bytes."""
    rng = random.Random(seed)
    model, kinds = random_model(rng), random_kinds(rng)
    while True:
        old = random_units(rng, model, kinds, RANKS, first_index=0)
        new = random_units(rng, model, kinds, RANKS, first_index=100)
        plan = plan_reshard(model, old, (old[0], *[one for one in new if not one.ranks & old[0].ranks]))
        if len(old) > 1 and len(plan.new) > 1 and plan.bytes:
            return plan


def test_a_bounded_move_frees_nothing_that_a_lane_still_reads() -> None:
    assert not any(moved(bounded_plan(7), 3, mode="bounded").values())


def test_a_buffer_is_filled_anew_after_its_last_reader() -> None:
    device = LateDevice(0)
    engine, pack, _, unpack = device.lanes
    pool = StagingPool(CPU, device.for_move)
    first = pool.take(64, pack)
    target = torch.zeros(64, dtype=torch.uint8)
    pack.copy([(torch.full((64,), 1, dtype=torch.uint8), first)])
    unpack.wait(pack.mark())
    unpack.copy([(first, target)])
    pool.give(first, unpack.mark())
    again = pool.take(60, pack)
    assert again.data_ptr() == first.data_ptr()
    pack.copy([(torch.full((60,), 2, dtype=torch.uint8), again)])
    device.drain()
    assert bool((target == 1).all())
    assert not engine.queue


def test_a_cpu_has_one_lane_that_is_always_done() -> None:
    lanes: Any = Lanes.of(CPU)
    assert isinstance(lanes.pack, HostLane)
    assert lanes.pack is lanes.engine
    assert lanes.end() is REACHED
