"""Ray's own part: its start, its end, and what a finished call of a worker says."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from nereus.emu.layout import Rank
from nereus.emu.signals import kept_handler
from nereus.errors import NereusError, StageFailed, WorkerLost, explain

RAY_FOLDER = str(Path(ray.__file__).parent)
RAYLET_ENDS_IN_S = 10.0


def start_ray(address: str, *, num_gpus: int | None) -> None:
    """Connect to Ray, or start a private one; it is ended again where a stop comes meanwhile."""
    try:
        with kept_handler(signal.SIGTERM):
            ray.init(
                address=address,
                include_dashboard=False if address == "local" else None,
                num_gpus=num_gpus,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except BaseException:
        end_ray()
        raise


def end_ray() -> None:
    """Leave Ray. The processes of a private one are ended together, after the raylet, which ends the workers:
    Ray itself ends one after the other and gives each a second.
    """
    raylets: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(word.startswith(RAY_FOLDER) for word in process.cmdline()):
                (raylets if process.name() == "raylet" else others).append(process)
    ender = Thread(target=_kill_after, args=(raylets, others), name="end of Ray")
    ender.start()
    ray.shutdown()
    ender.join()


def _kill_after(first: list[psutil.Process], others: list[psutil.Process]) -> None:
    """Kill the others once the first have ended, or have had their time. Who waits for them is not us."""
    end = time.monotonic() + RAYLET_ENDS_IN_S
    while any(map(_runs, first)) and time.monotonic() < end:
        time.sleep(0.02)
    for process in others:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def answers(ref: Any) -> bool:
    """Whether the worker of a finished call lives."""
    try:
        ray.get(ref)
    except RayActorError:
        return False
    return True


def value_of(ref: Any, rank: Rank, what: str) -> Any:
    """What a finished call of a worker returned; raises as `Cluster.run` does."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        kind = type(cause) if isinstance(cause, NereusError) else StageFailed
        raise kind(explain(f"{what} failed", values=f"worker {rank} raised {text}")) from error
    except RayActorError as error:
        raise WorkerLost(
            explain(
                f"{what} failed",
                values=f"worker {rank} died ({str(error).splitlines()[0]})",
                rule="a unit needs all of its workers",
                remedy="run again with --resume; if memory was short, lower batch.micro_batch_rows",
            )
        ) from error
