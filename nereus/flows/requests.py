"""Hears that somebody asks a running campaign to pause or to suspend, beside its steps.

    nereus pause | suspend, REST ─▶ state of the flow run ─▶ (thread, every 2 s) ─▶ taken at the next boundary

The request is a state's name, `Pausing` or `Suspending`, so the UI shows it until it is taken. A run that was
set to `Paused` from outside is taken back to `Pausing`: it still runs. One set to `Suspended` from outside
ends at its next task run, as Prefect does it, and continues from its newest checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectHTTPStatusError

POLL_S = 2.0  # a look costs 10 ms


class Asked(StrEnum):
    """What is asked for; the name of the state that says so."""

    PAUSE = "Pausing"
    SUSPEND = "Suspending"


class Requests:
    """What was asked of one flow run and not yet taken."""

    def __init__(self) -> None:
        self._asked: Asked | None = None
        self._lock = threading.Lock()

    def put(self, asked: Asked) -> None:
        """Somebody asks."""
        with self._lock:
            self._asked = asked

    def take(self) -> Asked | None:
        """What is asked for; it then counts as taken."""
        with self._lock:
            asked, self._asked = self._asked, None
        return asked


def ask(client: SyncPrefectClient, run_id: UUID, asked: Asked) -> None:
    """Ask a running flow run to pause or suspend at its next boundary."""
    client.set_flow_run_state(run_id, State(type=StateType.RUNNING, name=asked.value), force=True)


@contextmanager
def heard(run_id: UUID) -> Iterator[Requests]:
    """Listen for requests to the flow run as long as the block runs."""
    requests, ended = Requests(), threading.Event()
    listener = threading.Thread(target=_listen, args=(run_id, requests, ended), name="requests", daemon=True)
    listener.start()
    try:
        yield requests
    finally:
        ended.set()


def _listen(run_id: UUID, requests: Requests, ended: threading.Event) -> None:
    last: UUID | None = None
    with get_client(sync_client=True) as client:
        while not ended.wait(POLL_S):
            try:
                state = client.read_flow_run(run_id).state
                if state is None or state.id == last:
                    continue
                if state.name == "Paused" and state.state_details.pause_key is None:
                    ask(client, run_id, Asked.PAUSE)
                    requests.put(Asked.PAUSE)
                elif state.type == StateType.RUNNING and state.name is not None and state.name in [*Asked]:
                    requests.put(Asked(state.name))
                last = state.id
            except (httpx.HTTPError, PrefectHTTPStatusError):
                continue  # a server that restarts is asked again
