"""The key-value store that outlives workers: owned by the driver, joined by every worker as a client.

    driver: Store() ──listens──▶ address ──▶ worker: connect(address) ──▶ groups, votes, decisions

No worker hosts it, so no worker's death takes it along. It binds the given host only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # TCPStore is public but not in __all__
    DistNetworkError,
    DistStoreError,
    TCPStore,
)
from torch.distributed.distributed_c10d import Store as Client

from nereus.emu.layout import Rank
from nereus.errors import TransportError, explain

FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where a store listens."""

    host: str
    port: int


class Store:
    """The server and the driver's own client of it. `host` is the address that workers can reach."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, timeout_s: float = 30.0) -> None:
        listener = socket.create_server((host, port), backlog=1024)
        self.address = StoreAddress(host=host, port=listener.getsockname()[1])
        self.client: TCPStore = TCPStore(
            host,
            self.address.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),  # the server owns the descriptor from here on
        )

    def forget(self, prefix: str) -> int:
        """Delete every key under `prefix`, e.g. those of an epoch that is over; returns how many."""
        keys = [key for key in self.client.list_keys() if key.startswith(f"{prefix}/")]
        for key in keys:
            self.client.delete_key(key)
        return len(keys)

    def close(self) -> None:
        """Stop listening. Workers that still wait get an error."""
        del self.client


def connect(address: StoreAddress, *, timeout_s: float) -> Client:
    """A client of the store. Raises TransportError when it does not answer within `timeout_s`."""
    try:
        client: Client = TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        return client
    except (DistNetworkError, DistStoreError) as error:
        raise TransportError(
            explain(
                f"cannot reach the store at {address.host}:{address.port}",
                values=str(error).splitlines()[0],
                rule=f"it must answer within {timeout_s} s",
                remedy="check that the driver is alive and its host is reachable from this node",
            )
        ) from error


def meet(
    store: Client,
    place: str,
    *,
    me: Rank,
    workers: Iterable[Rank],
    timeout_s: float,
    over: Callable[[], str] = lambda: "",
) -> None:
    """Return once every one of `workers` has come to `place`; each place serves one meeting.

    `over` tells why there is no point in waiting any longer, if so. Raises TransportError then, and when
    somebody does not come in time or declined; it names them.
    """
    everyone = tuple(workers)
    keys = [f"{place}/{worker}" for worker in everyone]
    end = time.monotonic() + timeout_s
    slowest_s = max(LONGEST_POLL_S, len(everyone) / 2000)  # large meetings spare the store
    pause_s, why = FIRST_POLL_S, ""
    try:
        store.compare_set(f"{place}/{me}", "", "here")
        while not why and not store.check(keys):
            if time.monotonic() >= end:
                why = f"absent: {absentees(store, place, everyone)} after {timeout_s:.3g} s"
            elif not (why := over()):
                time.sleep(pause_s)
                pause_s = min(slowest_s, 1.5 * pause_s)
        if not why:
            words = decliners(store, place, everyone)
            why = ", ".join(f"worker {worker} declined: {word}" for worker, word in words.items())
    except (DistStoreError, DistNetworkError) as error:
        why = str(error).splitlines()[0]
    if why:
        raise TransportError(
            explain(
                f"worker {me} waited at {place} for {list(everyone)}",
                values=why,
                rule="all must come",
                remedy="remove the cause, or continue without them",
            )
        )


def decline(store: Client, place: str, *, worker: Rank, reason: str) -> None:
    """Tell those who meet at `place` that `worker` will not come, so that nobody waits for the deadline.

    Raises TransportError when the store does not answer.
    """
    try:
        store.set(f"{place}/{worker}", reason or "no reason given")
    except (DistStoreError, DistNetworkError) as error:
        raise TransportError(
            explain(f"cannot decline for worker {worker} at {place}", values=str(error).splitlines()[0])
        ) from error


def decliners(store: Client, place: str, workers: Iterable[Rank]) -> dict[Rank, str]:
    """Those who declined to come to `place`, with their reasons; all of them have come or declined.

    Raises TransportError when the store does not answer.
    """
    everyone = tuple(workers)
    try:
        words = store.multi_get([f"{place}/{worker}" for worker in everyone])
    except (DistStoreError, DistNetworkError) as error:
        raise TransportError(
            explain(f"cannot learn who declined to come to {place}", values=str(error).splitlines()[0])
        ) from error
    return {w: word.decode() for w, word in zip(everyone, words, strict=True) if word != b"here"}


def absentees(store: Client, place: str, workers: Iterable[Rank]) -> list[Rank]:
    """Those who have not come to `place`; empty when the store itself is gone."""
    try:
        return [worker for worker in workers if not store.check([f"{place}/{worker}"])]
    except (DistStoreError, DistNetworkError):
        return []
