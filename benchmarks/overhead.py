"""What tracking costs: each level, on SQLite or Postgres, and a thousand steps of eight tasks on one server.

    python -m benchmarks.overhead FOLDER [--postgres] [--samples 30] [--steps 1000] [--part levels]

Starts a Prefect server of its own, with its database in FOLDER; with --postgres a Postgres of its own, or
that of --database URL; and ends them. Results go to FOLDER/overhead.json part by part; what is there is not
measured again, and `growth` goes on where it was ended, but for --postgres, whose database is new each time.
Stages only wait, so what a step takes beyond its waits is Prefect's. Run it where nothing else runs;
`python -m benchmarks.overhead_page FOLDER` then writes the tables of docs/design/tracking.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.postgres import own_postgres
from tests.prefect_server import own_server

RESULTS_FILE = "overhead.json"
STAGES = 8
CHUNK = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--postgres", action="store_true", help="on a Postgres that is made for it")
    where.add_argument("--database", help="on this Postgres, postgresql+asyncpg://...; SQLite without either")
    parser.add_argument("--samples", type=int, default=12, help="steps at each level")
    parser.add_argument("--steps", type=int, default=1000, help="steps of growth in all")
    parser.add_argument("--part", choices=("levels", "auto", "growth"), action="append")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with it
    kind = "postgres" if options.postgres or options.database else "sqlite"
    results = Results(options.folder / RESULTS_FILE, kind)
    with database(options.postgres, options.database) as url, served(options.folder.resolve(), url):
        for part in options.part or ("levels", "auto", "growth"):
            if part == "levels":
                measure_levels(results, options.samples)
            elif part == "auto":
                measure_auto(results, -(-options.samples // 6))
            else:
                measure_growth(results, options.folder, url, options.steps, anew=options.postgres)
    print(json.dumps(results.values, indent=1))


@contextmanager
def database(is_made: bool, url: str | None) -> Iterator[str | None]:
    """The URL of the Postgres to measure on; None for SQLite."""
    if is_made:
        with own_postgres() as made:
            yield made
    else:
        yield url


@contextmanager
def served(folder: Path, url: str | None) -> Iterator[None]:
    """A Prefect server as a child process; this process, which has not loaded Prefect yet, talks to it."""
    with own_server(folder, url) as address:
        os.environ |= {
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_LOGGING_TO_API_ENABLED": "false",
            "PREFECT_LOGGING_LEVEL": "ERROR",
            "PREFECT_API_URL": f"{address}/api",
            "DO_NOT_TRACK": "1",
        }
        yield


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


def stepper(wait_s: float = 0.0, shared: int = 1) -> Callable[[str, int], None]:
    """A function that runs a step of eight waiting stages under a level, in the current flow run. At level
    `step` so many steps are `shared` by a task run.
    """
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.task_runners import ThreadPoolTaskRunner

    from nereus.flows.step_run import StepRuns
    from nereus.flows.tracking import PlainCalls, TaskRuns
    from nereus.record.step import StepRecord
    from tests.record.records import make_record

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

    def plain(number: int) -> StepRecord:
        with PlainCalls() as calls:
            stages(calls)
        return make_record(number)

    runs = StepRuns()

    def step(level: str, number: int) -> None:
        if level == "none":
            plain(number)
        elif level == "step":
            runs.step(number, shared, partial(plain, number))
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


def measure_levels(results: Results, num: int, wait_s: float = 8.0) -> None:
    """What each level adds to the wall of a step and to the driver's CPU; a stage takes a second, as those of
    a real job take some time: beginning a task run costs more after a rest than right after another one.
    """
    for level in ("none", "step", "tasks", "full"):
        if level in results.values:
            continue
        step = stepper(wait_s)

        def act(level: str = level, step: Callable[[str, int], None] = step) -> dict[str, float]:
            walls, cpus = [], []
            for number in range(num + 1):
                began, cpu = time.perf_counter(), cpu_s()
                step(level, number)
                walls.append(time.perf_counter() - began - wait_s)
                time.sleep(0.2)
                cpus.append(cpu_s() - cpu)  # a task run may end after its step
            walls, cpus = walls[1:], cpus[1:]
            return {
                "p50_ms": 1e3 * median(walls),
                "mean_ms": 1e3 * fmean(walls),
                "max_ms": 1e3 * max(walls),
                "cpu_ms": 1e3 * median(cpus),
                "load": os.getloadavg()[0],
            }

        results.put(level, in_campaign(act))


def measure_auto(results: Results, num: int) -> None:
    """The share of a step that tracking takes where `auto` chooses, against the same steps untracked: some
    of the one and as many of the other take turns, four seconds at least.
    """
    from nereus.config import Tracking
    from nereus.flows.tracking import ALLOWED_SHARE, COST_S, level, steps_a_run

    shortest_s = sorted(1.03 * cost_s / ALLOWED_SHARE for cost_s in COST_S.values())
    for step_s in (0.25, 1.0, *shortest_s):  # and steps that are just long enough for their level
        chosen, shared = str(level(Tracking.auto, step_s)), steps_a_run(Tracking.auto, step_s)
        name = f"auto {step_s:.2g} s"
        if name in results.values:
            continue

        def act(chosen: str = chosen, shared: int = shared, step_s: float = step_s) -> dict[str, Any]:
            step, steps = stepper(step_s, shared), shared * ceil(4.0 / (shared * step_s))
            times: dict[str, list[float]] = {"none": [], chosen: []}
            for number in range(num + 1):
                for which, taken in times.items():
                    began = time.perf_counter()
                    for index in range(steps):
                        step(which, number * steps + index)
                    if number:
                        taken.append(time.perf_counter() - began)
            plain, tracked = median(times["none"]), median(times[chosen])
            return {
                "level": chosen,
                "steps_a_run": shared,
                "share": tracked / plain - 1,
                "worst_share": max(times[chosen]) / plain - 1,
                "load": os.getloadavg()[0],
            }

        results.put(name, in_campaign(act))


def measure_growth(
    results: Results, folder: Path, database: str | None, steps: int, *, anew: bool, gap_s: float = 0.7
) -> None:
    """Steps with a subflow and eight task runs each; latency and size by chunk. `anew`: what was measured in
    part before is measured again.

    Between steps the server may write what it has put off: back to back, SQLite's one writer is the limit,
    and a step takes 2.6 s from the first on.
    """
    chunks: list[dict[str, Any]] = results.values.get("growth", [])
    if anew and chunks and chunks[-1]["steps"] < steps:
        chunks = []
    while (first := chunks[-1]["steps"] if chunks else 0) < steps:
        until = min(first + CHUNK, steps)
        step = stepper()

        def act(
            first: int = first, until: int = until, step: Callable[[str, int], None] = step
        ) -> list[float]:
            walls = []
            for number in range(first, until):
                time.sleep(gap_s)
                began = time.perf_counter()
                step("full", number)
                walls.append(time.perf_counter() - began)
            return walls

        walls: list[float] = in_campaign(act)
        chunk = {
            "steps": until,
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
