"""The decision record: the one fact that says whether a transition happened. It lies outside the workers.

Whoever writes the decision of an epoch first decides it; every later writer gets what stands. Hence a
successor of a dead coordinator may safely write `abort`: either it is first, or it learns that the epoch was
committed.
No decision means undecided, never abort: a worker that has voted yes waits.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store as Client

from nereus.errors import TransportError, explain

FIRST_POLL_S, LAST_POLL_S = 0.002, 0.1


class Outcome(StrEnum):
    """What was decided of an epoch."""

    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome of an epoch. `control` is the logical state that is true with it, as JSON."""

    epoch: int
    outcome: Outcome
    reason: str = ""
    control: str = ""

    @property
    def commits(self) -> bool:
        """Whether the new layout holds."""
        return self.outcome is Outcome.COMMIT

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The inverse of `to_json`."""
        raw = json.loads(text)
        return cls(**{**raw, "outcome": Outcome(raw["outcome"])})


class DecisionRecord(Protocol):
    """Decisions by epoch; each is written once."""

    def decide(self, decision: Decision) -> Decision:
        """Write it unless the epoch is decided already; returns the decision that stands.

        Raises TransportError when the record cannot be reached: then it is unknown whether it was written.
        """
        ...

    def read(self, epoch: int) -> Decision | None:
        """The decision of an epoch, None while there is none. Raises TransportError when unreachable."""
        ...


@dataclass(eq=False)
class MemoryRecord:
    """In one process, for tests and the simulator."""

    _decisions: dict[int, Decision] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, decision: Decision) -> Decision:
        """See DecisionRecord."""
        with self._lock:
            return self._decisions.setdefault(decision.epoch, decision)

    def read(self, epoch: int) -> Decision | None:
        """See DecisionRecord."""
        return self._decisions.get(epoch)


def decision_key(epoch: int) -> str:
    """Where the store keeps the decision of an epoch. A worker that still connects for it may give up."""
    return f"decision/{epoch}"


@dataclass(eq=False)
class StoreRecord:
    """In the driver's store: fast to reach for every worker; lives as long as the driver."""

    store: Client

    def decide(self, decision: Decision) -> Decision:
        """See DecisionRecord."""
        try:
            stands = self.store.compare_set(decision_key(decision.epoch), "", decision.to_json())
        except (DistNetworkError, DistStoreError) as error:
            raise _unreachable("the driver's store", decision.epoch, error) from error
        return Decision.from_json(stands.decode())

    def read(self, epoch: int) -> Decision | None:
        """See DecisionRecord."""
        try:
            if not self.store.check([decision_key(epoch)]):
                return None
            return Decision.from_json(self.store.get(decision_key(epoch)).decode())
        except (DistNetworkError, DistStoreError) as error:
            raise _unreachable("the driver's store", epoch, error) from error


@dataclass(eq=False)
class FileRecord:
    """A folder that the driver and the workers share; outlives the driver.

    A decision becomes visible by a hard link, which fails if it exists and is never half written; it is on
    disk before `decide` returns.
    """

    folder: Path

    def decide(self, decision: Decision) -> Decision:
        """See DecisionRecord."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f".{decision.epoch}.{os.getpid()}.{threading.get_ident()}"
            with draft.open("w") as file:
                file.write(decision.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, self._path(decision.epoch))
            except FileExistsError:
                pass  # decided already: what stands is read below
            else:
                _sync_folder(self.folder)
            finally:
                draft.unlink()
            stands = self.read(decision.epoch)
        except OSError as error:
            raise _unreachable(str(self.folder), decision.epoch, error) from error
        assert stands is not None, "a linked decision can be read"
        return stands

    def read(self, epoch: int) -> Decision | None:
        """See DecisionRecord."""
        try:
            return Decision.from_json(self._path(epoch).read_text())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(str(self.folder), epoch, error) from error

    def _path(self, epoch: int) -> Path:
        return self.folder / f"{epoch:08d}.json"


@dataclass(eq=False)
class CopiedRecord:
    """A record of truth and copies that are quicker to reach. Only the first decides.

    A copy is written after the truth, so a copy that has a decision has the one that stands.
    """

    truth: DecisionRecord
    copies: Sequence[DecisionRecord]

    def decide(self, decision: Decision) -> Decision:
        """See DecisionRecord."""
        stands = self.truth.decide(decision)
        for copy in self.copies:
            copy.decide(stands)
        return stands

    def read(self, epoch: int) -> Decision | None:
        """What a copy says, else what the truth says; raises only if the truth cannot be reached."""
        for copy in self.copies:
            try:
                found = copy.read(epoch)
            except TransportError:
                continue  # the truth below knows at least as much
            if found is not None:
                return found
        return self.truth.read(epoch)


def await_decision(record: DecisionRecord, epoch: int, *, wait_s: float) -> Decision | None:
    """The decision of an epoch, waited for; None after `wait_s`, with nothing changed: ask again.

    An unreachable record counts as one that has not answered yet, since its owner may come back.
    """
    end = time.monotonic() + wait_s
    pause_s = FIRST_POLL_S
    while True:
        try:
            if (decision := record.read(epoch)) is not None:
                return decision
        except TransportError:
            pass  # undecided as far as anyone here knows
        if time.monotonic() >= end:
            return None
        time.sleep(min(pause_s, max(0.0, end - time.monotonic())))
        pause_s = min(LAST_POLL_S, pause_s * 1.5)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreachable(where: str, epoch: int, error: Exception) -> TransportError:
    return TransportError(
        explain(
            f"cannot reach the decision record in {where}",
            values=f"epoch {epoch}: {str(error).splitlines()[0]}",
            rule="an epoch stays undecided until its record is read",
            remedy="bring the driver back, or read the durable record",
        )
    )
