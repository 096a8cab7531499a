"""Making communicators between processes, on a thread that can be left behind; and ending them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as Client

from nereus.emu.layout import Rank
from nereus.emu.store import decliners
from nereus.emu.transport.protocol import Deadline

CONNECT_POLL_S = 0.05
PLACE = "open"


class Attempt:
    """A communicator being made on a thread of its own, which can be left behind.

    gloo tries for 25 s to connect to a peer that died between the meeting and the connection, whatever the
    timeout (measured); NCCL may wait likewise. A thread left behind ends by itself and drops what it made.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Begin to make it."""
        self.result: Any = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self.result = make()
        except RuntimeError as error:  # includes the store's errors
            self._problem = str(error).splitlines()[0]

    def wait(self, deadline: Deadline, over: Callable[[], str]) -> str:
        """Return when it is made, failed, given up by a peer or late: why there is none, or nothing."""
        pause_s = CONNECT_POLL_S
        while self._thread.is_alive():
            self._thread.join(pause_s)
            pause_s = min(0.1, 2 * pause_s)
            if not self._thread.is_alive():
                break
            if why := over():
                return why
            if deadline.left_s == 0:
                return "no connection at the deadline"
        return self._problem


def declined_by(store: Client, ranks: Sequence[Rank]) -> str:
    """Which of the ranks will not come, and why; nothing when none has said so."""
    words = decliners(store, PLACE, ranks)
    return ", ".join(f"worker {worker} declined: {why}" for worker, why in words.items())


def prefix_of(epoch: int, digest: str) -> str:
    """The part of the store that one plan of one epoch has for itself."""
    return f"exchange/{epoch}/{digest}"


def make_communicator(
    shared: Client, prefix: str, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Any:
    """A bare backend object; it is registered nowhere, so nothing global remembers it.

    It gets a connection to the store of its own, since the caller may be left behind in a call on it.
    """
    store = PrefixStore(prefix, shared.clone())  # type: ignore[attr-defined]  # missing in the stubs
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with torch.cuda.device(device):
            group = dist.ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(device)
        return group
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def end_groups(groups: Sequence[Any], device: torch.device, *, broken: bool) -> None:
    """End bare backend objects. With `broken` what they have in flight is abandoned."""
    on_gpu = device.type == "cuda"
    if broken:
        # NCCL's aborts wait for one another (pytorch#119797) unless they are one group call.
        if joint := on_gpu and len(groups) > 1:
            groups[0]._group_start()
        for group in groups:
            group.abort()
        if joint:
            groups[0]._group_end()
    elif on_gpu:
        for group in groups:
            group.shutdown()
