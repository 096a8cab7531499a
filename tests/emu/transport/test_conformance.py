"""One suite for every transport: threads on the memory hub, real processes on gloo."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nereus.emu.store import Store, StoreAddress
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.memory import Hub, MemoryTransport
from nereus.emu.transport.protocol import (
    MAX_OPERATIONS,
    Broadcast,
    Channel,
    Deadline,
    Operation,
    Receive,
    Send,
    Transport,
)
from nereus.errors import TransportError
from tests.emu.processes import Workers

RANKS = (0, 3, 4)
HELD: dict[str, Transport] = {}
Script = Callable[..., Any]


def transport_of(worker: int, address: StoreAddress, reads: bool) -> Transport:
    """The process's transport, made at first use: it lives through epochs."""
    if "transport" not in HELD:
        HELD["transport"] = CollectiveTransport.connect(address, worker=worker, timeout_s=10.0, reads=reads)
    return HELD["transport"]


def in_process(worker: int, script: Script, address: StoreAddress, reads: bool, args: tuple[Any, ...]) -> Any:
    return script(worker, transport_of(worker, address, reads), *args)


class Gloo:
    """Runs a script on real processes."""

    reads = False

    def __init__(self) -> None:
        self.store, self.workers = Store(), Workers(RANKS)

    def run(self, script: Script, *args: Any) -> dict[int, Any]:
        return self.workers.run(in_process, script, self.store.address, self.reads, args)

    def close(self) -> None:
        self.workers.close()
        self.store.close()


class Reading(Gloo):
    """Processes that could read one another's memory; what is sent is sent all the same."""

    reads = True


class Memory:
    """Runs a script on threads."""

    def __init__(self) -> None:
        hub = Hub()
        self.transports = {rank: MemoryTransport(hub, rank) for rank in RANKS}

    def run(self, script: Script, *args: Any) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def body(rank: int) -> None:
            results[rank] = script(rank, self.transports[rank], *args)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in RANKS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == len(RANKS), f"only {sorted(results)} answered"
        return results

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture(scope="module", params=[Memory, Gloo, Reading], ids=["memory", "gloo", "reading"])
def world(request: pytest.FixtureRequest) -> Iterator[Memory | Gloo]:
    world = request.param()
    yield world
    world.close()


_EPOCHS = iter(range(1, 1_000_000))


@pytest.fixture
def epoch() -> int:
    return next(_EPOCHS)


def pattern(sender: int, receiver: int, index: int, num_bytes: int = 1000) -> torch.Tensor:
    return torch.full((num_bytes,), (sender * 50 + receiver * 7 + index) % 251, dtype=torch.uint8)


def greet(worker: int, channel: Channel) -> None:
    """A byte to and from everyone: all have connected then, so that one may close without breaking others."""
    peers = [rank for rank in RANKS if rank != worker]
    operations: list[Operation] = [Receive(peer, torch.zeros(1, dtype=torch.uint8)) for peer in peers]
    operations += [Send(peer, torch.zeros(1, dtype=torch.uint8)) for peer in peers]
    deadline = Deadline.after(20)
    for pending in channel.post(operations):
        pending.wait(deadline)


def all_to_all(worker: int, transport: Transport, epoch: int, count: int) -> bool:
    deadline = Deadline.after(10)
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=deadline)
    peers = [rank for rank in RANKS if rank != worker]
    into = {(peer, i): torch.zeros(1000, dtype=torch.uint8) for peer in peers for i in range(count)}
    operations: list[Operation] = [Receive(peer, into[peer, i]) for peer in peers for i in range(count)]
    operations += [Send(peer, pattern(worker, peer, i)) for peer in peers for i in range(count)]
    for pending in channel.post(operations):
        pending.wait(deadline)
    channel.settle(deadline)
    transport.close(epoch)
    return all(bool((into[p, i] == pattern(p, worker, i)).all()) for p in peers for i in range(count))


def test_buffers_arrive_in_the_order_of_posting(world: Memory | Gloo, epoch: int) -> None:
    assert all(world.run(all_to_all, epoch, 20).values())


def test_a_whole_group_call_of_operations_arrives(world: Memory | Gloo, epoch: int) -> None:
    assert all(world.run(all_to_all, epoch, MAX_OPERATIONS // 4).values())


GROUPS = ((0, 3), (0, 3, 4), (3, 4))


def broadcasts(worker: int, transport: Transport, epoch: int) -> bool:
    """Every set of ranks broadcasts from each of its members, all in one group call."""
    deadline = Deadline.after(20)
    mine = tuple(group for group in GROUPS if worker in group)
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=deadline, groups=mine)
    operations = [
        Broadcast(root, group, pattern(root, len(group), 5) * (root == worker))
        for group in mine
        for root in group
    ]
    for pending in channel.post(operations):
        pending.wait(deadline)
    channel.settle(deadline)
    transport.close(epoch)
    return all(bool((one.buffer == pattern(one.root, len(one.ranks), 5)).all()) for one in operations)


def test_broadcasts_reach_their_groups(world: Memory | Gloo, epoch: int) -> None:
    assert all(world.run(broadcasts, epoch).values())


def departed_root(worker: int, transport: Transport, epoch: int) -> tuple[str, float]:
    """Rank 4 closes its channel instead of broadcasting."""
    deadline = Deadline.after(20)
    mine = tuple(group for group in GROUPS if worker in group)
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=deadline, groups=mine)
    greet(worker, channel)
    start = time.monotonic()
    try:
        if worker != 4:
            (pending,) = channel.post([Broadcast(4, RANKS, torch.zeros(8, dtype=torch.uint8))])
            pending.wait(Deadline.after(20))
    except TransportError as error:
        return str(error), time.monotonic() - start
    finally:
        transport.close(epoch, broken=True)
    return "", 0.0


def test_a_root_that_departed_is_named_at_once(world: Memory | Gloo, epoch: int) -> None:
    answers = world.run(departed_root, epoch)
    for worker in (0, 3):
        message, late_s = answers[worker]
        assert "worker 4" in message
        assert late_s < 5


def too_many(worker: int, transport: Transport, epoch: int) -> bool:
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(20))
    greet(worker, channel)
    operation = Receive(RANKS[0] if worker else RANKS[1], torch.zeros(1, dtype=torch.uint8))
    try:
        channel.post([operation] * (MAX_OPERATIONS + 1))
    except AssertionError:
        return True
    finally:
        transport.close(epoch, broken=True)
    return False


def test_more_operations_than_the_cap_are_refused(world: Memory | Gloo, epoch: int) -> None:
    assert all(world.run(too_many, epoch).values())


def silent_peer(worker: int, transport: Transport, epoch: int) -> tuple[str, float]:
    """Everyone waits for rank 4, which sends nothing and stays connected until all have given up."""
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(20))
    greet(worker, channel)
    start = time.monotonic()
    try:
        if worker != 4:
            deadline = Deadline.after(0.5)
            (pending,) = channel.post([Receive(4, torch.zeros(8, dtype=torch.uint8))])
            pending.wait(deadline)
        else:
            time.sleep(1.5)
    except TransportError as error:
        return str(error), time.monotonic() - start
    finally:
        transport.close(epoch, broken=True)
    return "", 0.0


def test_a_late_peer_is_named_at_the_deadline(world: Memory | Gloo, epoch: int) -> None:
    answers = world.run(silent_peer, epoch)
    for worker in (0, 3):
        message, late_s = answers[worker]
        assert f"worker {worker} could not receive from worker 4 in time" in message
        assert 0.4 < late_s < 1.4


def departed_peer(worker: int, transport: Transport, epoch: int) -> tuple[str, float]:
    """Rank 4 closes its channel; the others must hear of it long before their deadline."""
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(20))
    greet(worker, channel)
    start = time.monotonic()
    try:
        if worker != 4:
            (pending,) = channel.post([Receive(4, torch.zeros(8, dtype=torch.uint8))])
            pending.wait(Deadline.after(20))
    except TransportError as error:
        return str(error), time.monotonic() - start
    finally:
        transport.close(epoch, broken=True)
    return "", 0.0


def test_a_departed_peer_is_named_at_once(world: Memory | Gloo, epoch: int) -> None:
    answers = world.run(departed_peer, epoch)
    for worker in (0, 3):
        message, late_s = answers[worker]
        assert "worker 4" in message
        assert late_s < 5


def absent_peer(worker: int, transport: Transport, epoch: int) -> str:
    if worker == 3:
        return ""
    try:
        transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(0.5))
    except TransportError as error:
        return str(error)
    return "opened"


def test_an_absent_peer_is_named(world: Memory | Gloo, epoch: int) -> None:
    answers = world.run(absent_peer, epoch)
    assert "absent: [3]" in answers[0]
    assert "absent: [3]" in answers[4]


def declining_peer(worker: int, transport: Transport, epoch: int) -> tuple[str, float]:
    start = time.monotonic()
    if worker == 3:
        time.sleep(0.1)
        transport.decline(epoch=epoch, digest="d", reason="no memory")
        return "", 0.0
    try:
        transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(20))
    except TransportError as error:
        return str(error), time.monotonic() - start
    return "opened", 0.0


def test_a_peer_that_declines_is_not_waited_for(world: Memory | Gloo, epoch: int) -> None:
    answers = world.run(declining_peer, epoch)
    for worker in (0, 4):
        message, late_s = answers[worker]
        assert "worker 3 declined: no memory" in message
        assert late_s < 5


def other_plan(worker: int, transport: Transport, epoch: int) -> str:
    try:
        digest = "x" if worker == 3 else "d"
        transport.open(RANKS, epoch=epoch, digest=digest, deadline=Deadline.after(0.5))
    except TransportError as error:
        return str(error)
    return "opened"


def test_different_plans_never_share_a_channel(world: Memory | Gloo, epoch: int) -> None:
    answers = world.run(other_plan, epoch)
    assert "absent: [3]" in answers[0]
    assert "absent: [0, 4]" in answers[3]


def late_message(worker: int, transport: Transport, epoch: int) -> tuple[bool, int]:
    """Rank 0 sends in an epoch that is aborted before the others receive; then all meet in the next."""
    deadline = Deadline.after(10)
    channel = transport.open(RANKS, epoch=epoch, digest="d", deadline=deadline)
    greet(worker, channel)
    if worker == 0:
        channel.post([Send(3, pattern(9, 9, 9)), Send(4, pattern(9, 9, 9))])
    time.sleep(0.3)
    transport.close(epoch, broken=True)
    try:
        transport.open(RANKS, epoch=epoch, digest="d", deadline=deadline)
        reopened = True
    except TransportError:
        reopened = False
    fresh = transport.open(RANKS, epoch=epoch + 500_000, digest="d", deadline=deadline)
    got = torch.zeros(1000, dtype=torch.uint8)
    operations: list[Operation] = (
        [Send(3, pattern(0, 3, 0)), Send(4, pattern(0, 4, 0))] if worker == 0 else [Receive(0, got)]
    )
    for pending in fresh.post(operations):
        pending.wait(deadline)
    transport.close(epoch + 500_000)
    return reopened, int(got[0]) - int(pattern(0, worker, 0)[0]) if worker else 0


def test_no_message_of_an_aborted_epoch_lands_in_a_later_one(world: Memory | Gloo, epoch: int) -> None:
    assert set(world.run(late_message, epoch).values()) == {(False, 0)}


def resources(worker: int) -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("kind", [Gloo, Reading])
def test_channels_leave_no_descriptors_or_threads(kind: type[Gloo]) -> None:
    world = kind()
    try:
        assert all(world.run(all_to_all, next(_EPOCHS), 4).values())
        before = world.workers.run(resources)
        for _ in range(5):
            assert all(world.run(all_to_all, next(_EPOCHS), 4).values())
            world.run(departed_peer, next(_EPOCHS))
        assert world.workers.run(resources) == before
    finally:
        world.close()
