"""What tracking costs: each level, on SQLite or Postgres, and a thousand steps of eight tasks on one server.

    python benchmarks/overhead.py FOLDER [--database URL] [--steps 1000] [--part levels|auto|growth]

Starts a Prefect server of its own, with its database in FOLDER unless a URL is given, and ends it. Results go
to FOLDER/overhead.json part by part; what is there is not measured again, and `growth` goes on where it was
ended. Stages only wait, so what a step takes beyond its waits is Prefect's. Run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

STAGES = 8
CHUNK = 50
AUTO_S = (1.0, 3.0, 6.0, 31.0)
"""Step lengths around those at which `auto` changes its level."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--database", help="a Postgres URL (postgresql+asyncpg://...); SQLite when absent")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--part", choices=("levels", "auto", "growth"), action="append")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    kind = "postgres" if options.database else "sqlite"
    results = Results(options.folder / "overhead.json", kind)
    with server(options.folder.resolve(), options.database):
        for part in options.part or ("levels", "auto", "growth"):
            if part == "levels":
                measure_levels(results)
            elif part == "auto":
                measure_auto(results)
            else:
                measure_growth(results, options.folder, options.database, options.steps)
    print(json.dumps(results.values, indent=1))


class Results:
    """The measured values of one kind of database, kept in a file from the moment they are known."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind
        self._all: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    @property
    def values(self) -> dict[str, Any]:
        return self._all.setdefault(self._kind, {})

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self._all, indent=1))
        whole.replace(self._path)


@contextmanager
def server(folder: Path, database: str | None) -> Iterator[None]:
    """A Prefect server as a child process; this process talks to it from then on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = database or f"sqlite+aiosqlite:///{folder / 'prefect.db'}"
    os.environ |= {
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_API_DATABASE_CONNECTION_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_healthy(os.environ["PREFECT_API_URL"], process)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended; see server.log"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError("the server did not answer")


def stepper(wait_s: float = 0.0) -> Callable[[str, int], None]:
    """A function that runs a step of eight waiting stages under a level, in the current flow run."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.task_runners import ThreadPoolTaskRunner

    from nereus.flows.tracking import PlainCalls, TaskRuns

    @task(name="stage", cache_policy=NO_CACHE)
    def stage(number: int) -> int:
        time.sleep(wait_s / STAGES)
        return number

    def stages(calls: Any) -> None:
        for number in range(STAGES):
            assert calls.start(stage, number).result() == number

    @flow(name="step", task_runner=ThreadPoolTaskRunner(max_workers=8), validate_parameters=False)  # type: ignore[arg-type]
    def step_flow(number: int) -> None:
        stages(TaskRuns())

    @task(name="step", cache_policy=NO_CACHE)
    def step_task(number: int) -> None:
        with PlainCalls() as calls:
            stages(calls)

    def step(level: str, number: int) -> None:
        if level == "none":
            with PlainCalls() as calls:
                stages(calls)
        elif level == "step":
            step_task(number)
        elif level == "tasks":
            stages(TaskRuns())
        else:
            with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
                step_flow(number)

    return step


def in_campaign(act: Callable[[], Any]) -> Any:
    """Run `act` inside a flow run, as a campaign runs its steps."""
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    @flow(name="overhead", task_runner=ThreadPoolTaskRunner(max_workers=8))  # type: ignore[arg-type]
    def overhead() -> None:
        found.append(act())

    found: list[Any] = []
    overhead()
    return found[0]


def measure_levels(results: Results, num: int = 30, gap_s: float = 1.0) -> None:
    """Wall and CPU of a step at each level, steps a second apart as those of a real job are."""
    for level in ("none", "step", "tasks", "full"):
        if level in results.values:
            continue
        step = stepper()

        def act(level: str = level, step: Callable[[str, int], None] = step) -> dict[str, float]:
            walls, cpus = [], []
            for number in range(num + 2):
                time.sleep(gap_s)
                began, cpu = time.perf_counter(), cpu_s()
                step(level, number)
                walls.append(time.perf_counter() - began)
                cpus.append(cpu_s() - cpu)
            walls, cpus = walls[2:], cpus[2:]
            return {
                "p50_ms": 1e3 * median(walls),
                "max_ms": 1e3 * max(walls),
                "cpu_ms": 1e3 * median(cpus),
                "load": os.getloadavg()[0],
            }

        results.put(level, in_campaign(act))


def measure_auto(results: Results, num: int = 5) -> None:
    """The share of a step that tracking takes where `auto` chooses, against the same step untracked."""
    from nereus.config import Tracking
    from nereus.flows.tracking import level

    for step_s in AUTO_S:
        name = f"auto {step_s:g} s"
        if name in results.values:
            continue
        chosen = str(level(Tracking.auto, step_s))

        def act(chosen: str = chosen, step_s: float = step_s) -> dict[str, Any]:
            step = stepper(step_s)
            times: dict[str, list[float]] = {"none": [], chosen: []}
            for number in range(num + 1):
                for which, taken in times.items():
                    began = time.perf_counter()
                    step(which, number)
                    if number:
                        taken.append(time.perf_counter() - began)
            plain, tracked = median(times["none"]), median(times[chosen])
            return {"level": chosen, "share": tracked / plain - 1, "load": os.getloadavg()[0]}

        results.put(name, in_campaign(act))


def measure_growth(results: Results, folder: Path, database: str | None, steps: int) -> None:
    """Steps with a subflow and eight task runs each, back to back; latency and size by chunk."""
    chunks: list[dict[str, float]] = results.values.get("growth", [])
    while len(chunks) * CHUNK < steps:
        first = len(chunks) * CHUNK
        step = stepper()

        def act(first: int = first, step: Callable[[str, int], None] = step) -> list[float]:
            walls = []
            for number in range(first, first + CHUNK):
                began = time.perf_counter()
                step("full", number)
                walls.append(time.perf_counter() - began)
            return walls

        walls: list[float] = in_campaign(act)
        chunk = {
            "steps": first + CHUNK,
            "p50_ms": 1e3 * median(walls),
            "max_ms": 1e3 * max(walls),
            "size_mb": size_bytes(folder, database) / 1e6,
            "load": os.getloadavg()[0],
        }
        chunks.append(chunk)
        results.put("growth", chunks)
        print(chunk, flush=True)


def size_bytes(folder: Path, database: str | None) -> int:
    """Bytes of the server's database."""
    if database is None:
        return sum(path.stat().st_size for path in folder.glob("prefect.db*"))
    import asyncio

    import asyncpg  # type: ignore[import-untyped]

    async def ask() -> int:
        connection = await asyncpg.connect(database.replace("+asyncpg", ""))
        size: int = await connection.fetchval("SELECT pg_database_size(current_database())")
        await connection.close()
        return size

    return asyncio.run(ask())


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
