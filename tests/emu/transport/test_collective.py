"""What only the transport between processes promises: a decided epoch frees those who still connect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed.distributed_c10d import PrefixStore

from nereus.emu.decision import Decision, Outcome, StoreRecord
from nereus.emu.store import Store, StoreAddress, connect, meet
from nereus.emu.transport.collective import CollectiveTransport
from nereus.emu.transport.protocol import Deadline
from nereus.errors import TransportError
from tests.emu.processes import Workers

RANKS = (0, 1, 2)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(RANKS)
    yield pool
    pool.close()


def open_channel(
    worker: int, address: StoreAddress, epoch: int, absent: str, allowed_s: float
) -> tuple[str, float]:
    """Worker 2 comes to the meeting or does not, and never connects; the others try."""
    start = time.monotonic()
    if worker == 2:
        if absent == "after it":
            store = PrefixStore(f"exchange/{epoch}/d", connect(address, timeout_s=10))
            meet(store, "open", me=worker, workers=RANKS, timeout_s=10)
        return "", 0.0
    transport = CollectiveTransport.connect(address, worker=worker)
    try:
        transport.open(RANKS, epoch=epoch, digest="d", deadline=Deadline.after(allowed_s))
    except TransportError as error:
        return str(error), time.monotonic() - start
    return "opened", 0.0


@pytest.mark.parametrize("absent", ["from the meeting", "after it"])
def test_a_decided_epoch_frees_those_who_still_connect(workers: Workers, absent: str) -> None:
    store = Store()
    try:
        abort = Decision(epoch=7, outcome=Outcome.ABORT, reason="worker 2: its process has ended")
        timer = threading.Timer(0.5, StoreRecord(store.client).decide, [abort])
        timer.start()
        answers = workers.run(open_channel, store.address, 7, absent, 60.0, timeout_s=50)
        timer.join(5)
        for worker in (0, 1):
            message, late_s = answers[worker]
            assert "the epoch is decided already" in message
            assert late_s < 10, "freed by the decision, not by the deadline of 60 s"
    finally:
        store.close()


@pytest.mark.parametrize("absent", ["from the meeting", "after it"])
def test_the_deadline_bounds_connecting(workers: Workers, absent: str) -> None:
    store = Store()
    try:
        answers = workers.run(open_channel, store.address, 8, absent, 1.0, timeout_s=50)
        for worker in (0, 1):
            message, late_s = answers[worker]
            assert "absent: [2]" in message or "deadline" in message or "timeout" in message
            assert 0.9 < late_s < 10
    finally:
        store.close()
