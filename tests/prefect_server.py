"""A Prefect server of one's own, as users start it: with all its services, on SQLite or a given database."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 600.0  # alone it takes 6 s; beside a full suite on two cores much longer


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def own_server(folder: Path, database: str | None = None, *, ui: bool = False) -> Iterator[str]:
    """Its URL, without `/api`; it is ended by its pid. It keeps its things in `folder`, and there its log."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_DATABASE_CONNECTION_URL": database or f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    command += [] if ui else ["--no-ui"]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/api/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the Prefect server ended; see its server.log"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end, f"the Prefect server did not answer within {START_S:.0f} s"
            time.sleep(0.2)


@contextmanager
def talking_to(url: str) -> Iterator[None]:
    """Inside, flows of this process are runs on the server at `url`. All that is to be told it has been told
    at the end: Prefect would try for minutes to reach a server that has ended.
    """
    import prefect.context as contexts
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # Threads see the process's settings: Prefect's own harness replaces them in the same way.
    with temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        before = contexts.GLOBAL_SETTINGS_CONTEXT
        contexts.GLOBAL_SETTINGS_CONTEXT = contexts.get_settings_context()
        try:
            yield
        finally:
            EventsWorker.drain_all(timeout=30, at_exit=False)
            contexts.GLOBAL_SETTINGS_CONTEXT = before
