"""A Postgres of one's own: a fresh cluster in a temporary folder, on a free port of the loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.prefect_server import free_port

DEBIAN = Path("/usr/lib/postgresql")  # where Debian puts what it keeps out of PATH
LIMIT_S = 120.0


def postgres_programs() -> Path | None:
    """The folder of `initdb` and `postgres`, None where Postgres is not installed."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    newest = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return newest[-1].parent if newest else None


@contextmanager
def own_postgres(*, durable: bool = True) -> Iterator[str]:
    """The URL, as Prefect takes it, of a database that exists inside. Without `durable` nothing is synced to
    the disk.

    Raises FileNotFoundError where Postgres is not installed. It refuses to run as root: then it runs as the
    user `postgres`, whom its packages make.
    """
    programs = postgres_programs()
    if programs is None:
        raise FileNotFoundError("no initdb in PATH or under /usr/lib/postgresql: install postgresql")
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="nereus-postgres-"))
    data, port = folder / "data", free_port()
    try:
        if user is not None:
            shutil.chown(folder, user)
        command = [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        subprocess.run(command, cwd=folder, user=user, check=True, capture_output=True, timeout=LIMIT_S)
        command = [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder]
        command += [] if durable else ["-c", "fsync=off", "-c", "synchronous_commit=off"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, user=user, stdout=log, stderr=log)
        try:
            _wait_until_ready(programs / "pg_isready", port, process)
            yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # Postgres's fast shutdown
            process.wait(LIMIT_S)
    finally:
        shutil.rmtree(folder)


def _wait_until_ready(is_ready: Path, port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT_S
    while subprocess.run([is_ready, "-q", "-h", "127.0.0.1", "-p", str(port)]).returncode != 0:
        assert process.poll() is None, "Postgres ended"
        assert time.monotonic() < end, f"Postgres did not answer within {LIMIT_S:.0f} s"
        time.sleep(0.1)
