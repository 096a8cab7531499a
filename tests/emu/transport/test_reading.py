"""Ranks that read one another's memory, in real processes: what is lent, what is denied, what dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from nereus.emu.store import Store, StoreAddress
from nereus.emu.transport import process_memory
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.protocol import Channel, Deadline, Fetch, Offer, Operation, Receive, Send
from nereus.errors import TransportError
from tests.emu.processes import Died, Raised, Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")
RANKS = (0, 1, 2)
_EPOCHS = iter(range(1, 1_000_000))


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(RANKS)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def opened(worker: int, address: StoreAddress, epoch: int, *, reads: bool = True) -> Channel:
    transport = CollectiveTransport.connect(address, worker=worker, reads=reads)
    return transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(20))


def numbers(worker: int) -> torch.Tensor:
    return torch.arange(64 * 48, dtype=torch.float32).view(64, 48) + 10_000 * worker


def deny(worker: int) -> None:
    """Make this process one that may not read the others, and that they may not read."""
    if os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)  # other processes keep their rights over it
    else:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def swap(worker: int, address: StoreAddress, epoch: int, denied: int, unwilling: int) -> dict[int, bool]:
    """Everyone gives everyone a strided part of its numbers, by whatever way the pair has."""
    if worker == denied:
        deny(worker)
    channel = opened(worker, address, epoch, reads=worker != unwilling)
    peers = [rank for rank in RANKS if rank != worker]
    mine, into = numbers(worker), {peer: torch.zeros(64, 90) for peer in peers}
    operations: list[Operation] = []
    slots: dict[int, torch.Tensor] = {}
    for peer in peers:
        lent, filled = mine[5:40, 8:], into[peer][20:55, 40:80]
        if channel.reads(peer):
            operations += [Fetch(peer, (filled,)), Offer(peer, (lent,))]
        else:
            slots[peer] = torch.zeros(35, 40)
            operations.append(Receive(peer, slots[peer].view(-1).view(torch.uint8)))
            operations.append(Send(peer, lent.contiguous().view(-1).view(torch.uint8)))
    deadline = Deadline.after(20)
    pending = channel.post(operations)
    for operation, one in zip(operations, pending, strict=True):
        if isinstance(operation, Fetch | Receive):
            one.wait(deadline)
    for operation, one in zip(operations, pending, strict=True):
        if isinstance(operation, Offer | Send):
            one.wait(deadline)
    channel.settle(deadline)
    for peer, slot in slots.items():
        into[peer][20:55, 40:80].copy_(slot)
    for peer in peers:
        assert torch.equal(into[peer][20:55, 40:80], numbers(peer)[5:40, 8:]), peer
        assert not into[peer][:, :40].any()
    return {peer: channel.reads(peer) for peer in peers}


def test_strided_parts_are_read_where_they_lie(workers: Workers, store: Store) -> None:
    answers = workers.run(swap, store.address, next(_EPOCHS), -1, -1)
    assert all(all(found.values()) for found in answers.values())


def test_a_pair_that_is_denied_falls_back_and_the_others_read(workers: Workers, store: Store) -> None:
    answers = workers.run(swap, store.address, next(_EPOCHS), 1, -1)
    assert answers == {0: {1: False, 2: True}, 1: {0: False, 2: False}, 2: {0: True, 1: False}}


def test_a_rank_that_will_not_read_is_not_read_either(workers: Workers, store: Store) -> None:
    answers = workers.run(swap, store.address, next(_EPOCHS), -1, 2)
    assert answers == {0: {1: True, 2: False}, 1: {0: True, 2: False}, 2: {0: False, 1: False}}


def offer_and_die(worker: int, address: StoreAddress, epoch: int, after_s: float) -> str:
    """Rank 0 offers 4 MiB and dies while rank 1 reads it, a page at a time and slowly."""
    channel = opened(worker, address, epoch)
    numbers = torch.ones(4 << 20, dtype=torch.uint8)
    if worker == 0:
        threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
        (pending,) = channel.post([Offer(1, (numbers,))])
        pending.wait(Deadline.after(20))
    elif worker == 1:
        process_memory.CALL_BYTES = 4096
        at_once = process_memory._read_once

        def slowly(*args: Any) -> int:
            time.sleep(0.002)
            return at_once(*args)

        setattr(process_memory, "_read_once", slowly)  # noqa: B010
        (pending,) = channel.post([Fetch(0, (torch.zeros_like(numbers),))])
        try:
            pending.wait(Deadline.after(20))
        except TransportError as error:
            return str(error)
    return ""


def test_a_source_killed_during_the_read_is_named(workers: Workers, store: Store) -> None:
    epoch = next(_EPOCHS)
    start = time.monotonic()
    for rank in RANKS:
        workers.call(rank, offer_and_die, store.address, epoch, 0.5)
    with pytest.raises(Died):
        workers.result(0)
    message = workers.result(1)
    assert "worker 1 could not read the memory of worker 0" in message
    assert "No such process" in message
    assert time.monotonic() - start < 10
    workers.result(2)


def give_up(worker: int, address: StoreAddress, epoch: int) -> str:
    """Rank 0 gives up its offer while rank 1 has not read it; the memory may change from then on."""
    channel = opened(worker, address, epoch)
    numbers = torch.ones(1000, dtype=torch.uint8)
    problem = ""
    if worker == 0:
        (pending,) = channel.post([Offer(1, (numbers,))])
        try:
            pending.wait(Deadline.after(0.3))
        except TransportError as error:
            problem = str(error)
        channel.close(broken=True)
        time.sleep(1.0)
    elif worker == 1:
        (pending,) = channel.post([Fetch(0, (torch.zeros_like(numbers),))])
        pending.told.wait(Deadline.after(5))  # type: ignore[attr-defined]
        pending.told = _Told()  # type: ignore[attr-defined]
        time.sleep(0.7)
        try:
            pending.wait(Deadline.after(5))
        except TransportError as error:
            problem = str(error)
    return problem


class _Told:
    def wait(self, deadline: Deadline) -> None:
        """The windows have arrived before."""


def test_nothing_is_taken_from_an_offer_that_was_given_up(workers: Workers, store: Store) -> None:
    answers = workers.run(give_up, store.address, next(_EPOCHS))
    assert "worker 0 could not receive from worker 1 in time" in answers[0]
    assert "worker 1 could not read the memory of worker 0" in answers[1]
    assert "revoked" in answers[1]


def misfit(worker: int, address: StoreAddress, epoch: int) -> None:
    channel = opened(worker, address, epoch)
    if worker == 0:
        (pending,) = channel.post([Offer(1, (torch.zeros(10),))])
        with suppress(TransportError):  # its reader refuses and goes
            pending.wait(Deadline.after(5))
    elif worker == 1:
        (pending,) = channel.post([Fetch(0, (torch.zeros(11),))])
        pending.wait(Deadline.after(5))


def test_an_offer_of_other_sizes_is_refused(workers: Workers, store: Store) -> None:
    with pytest.raises(Raised, match="other sizes than planned"):
        workers.run(misfit, store.address, next(_EPOCHS))
