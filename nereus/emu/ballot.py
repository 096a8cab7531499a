"""Votes of an epoch: cast by workers, collected by the coordinator; the dead and the silent count as no."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store as Client

from nereus.emu.layout import Rank
from nereus.errors import TransportError, explain

POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Whether a worker holds everything that the new layout needs of it; `reason` says why not."""

    worker: Rank
    epoch: int
    yes: bool
    reason: str = ""
    sent_bytes: int = 0
    prepare_s: float = 0.0


def cast(store: Client, vote: Vote) -> None:
    """Make the vote known. Raises TransportError when it cannot: the vote then counts as no."""
    try:
        store.set(f"vote/{vote.epoch}/{vote.worker}", json.dumps(asdict(vote)))
    except (DistNetworkError, DistStoreError) as error:
        raise TransportError(
            explain(
                f"worker {vote.worker} could not vote in epoch {vote.epoch}",
                values=str(error).splitlines()[0],
                rule="votes lie in the driver's store",
            )
        ) from error


def collect(
    store: Client,
    epoch: int,
    workers: Collection[Rank],
    *,
    deadline_s: float,
    dead: Callable[[], Collection[Rank]] = tuple,
) -> Mapping[Rank, Vote]:
    """One vote of each worker. Returns at the first no: an epoch needs every yes.

    `dead` tells which workers' processes have ended. Silent until then, or the deadline, is a no.
    """
    end = time.monotonic() + deadline_s
    votes: dict[Rank, Vote] = {}
    while len(votes) < len(workers):
        gone = set(dead())  # before the check: a vote cast just before a death counts
        for worker in workers:
            if worker not in votes and store.check([f"vote/{epoch}/{worker}"]):
                votes[worker] = Vote(**json.loads(store.get(f"vote/{epoch}/{worker}")))
        silent = [worker for worker in workers if worker not in votes]
        over = time.monotonic() >= end or any(not vote.yes for vote in votes.values())
        for worker in silent:
            if worker in gone:
                votes[worker] = _missing(worker, epoch, "its process has ended")
            elif time.monotonic() >= end:
                votes[worker] = _missing(worker, epoch, f"no vote within {deadline_s:.3g} s")
        if over or any(not vote.yes for vote in votes.values()):
            break
        time.sleep(POLL_S)
    return votes


def _missing(worker: Rank, epoch: int, reason: str) -> Vote:
    return Vote(worker=worker, epoch=epoch, yes=False, reason=f"worker {worker}: {reason}")
