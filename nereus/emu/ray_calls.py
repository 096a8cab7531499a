"""Ray's own part: its start, and what a finished call of a worker says."""

from __future__ import annotations

import logging
import signal
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nereus.emu.layout import Rank
from nereus.emu.signals import kept_handler
from nereus.errors import NereusError, StageFailed, WorkerLost, explain


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
        ray.shutdown()
        raise


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
