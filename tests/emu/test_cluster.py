"""The driver's side of the workers, without Ray."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nereus.emu import cluster as module
from nereus.emu.cluster import Call, Cluster
from nereus.emu.store import Store
from nereus.errors import Cancelled


class Calls:
    """What `Cluster` uses of Ray: calls that never end, and when it was shut down."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.left_s = 0.0
        self.shut_s = 0.0

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.inside.release()
        time.sleep(timeout)
        self.left_s = time.monotonic()
        return [], refs

    def kill(self, actor: Any) -> None:
        assert self.left_s, "nobody waits any more"

    def shutdown(self) -> None:
        self.shut_s = time.monotonic()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(module, "ray", calls)
    monkeypatch.setattr(module, "end_ray", calls.shutdown)
    return calls


@pytest.fixture
def cluster(calls: Calls) -> Cluster:
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *arguments: object()))
    made = Cluster(
        lambda rank: actor, Store("127.0.0.1"), owns_ray=True, timeout_s=1.0, stop=threading.Event()
    )
    made._actors = {0: actor}
    return made


@pytest.mark.parametrize("how", ["run", "converse"])
def test_ray_ends_when_every_thread_has_left_its_wait(calls: Calls, cluster: Cluster, how: str) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            if how == "run":
                cluster.run({0: Call("ping")}, what="wait")
            else:
                cluster.converse({0: Call("ping")}, lambda answer: {}, what="wait")
        except Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    calls.inside.acquire()
    cluster.close()
    thread.join()
    assert len(raised) == 1
    assert 0 < calls.left_s <= calls.shut_s
    with pytest.raises(Cancelled):
        cluster.submit({})
