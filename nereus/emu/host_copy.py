"""A shard in host memory while new shards take its place on the device: what a spill leaves, and takes back.

    device: vacated ◀──put back (abort)──┐
       │ take                            │
       ▼                                 │
    host: the same numbers, from which the transition's operations read ──drop (commit)──▶ nothing

The tensors on the device keep their place, so an engine that holds them goes on after an abort. On a GPU the
host's memory is locked, so that copies run at the speed of the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nereus.emu.arena import Arena, ShardState
from nereus.emu.lanes import Lanes
from nereus.emu.page_locks import lock_pages
from nereus.emu.transport.protocol import Deadline, reached_in_time
from nereus.errors import TransportError, explain


@dataclass(frozen=True, eq=False)
class HostCopy:
    """`state` has the numbers, in host memory; `vacated` is where they belong."""

    vacated: ShardState
    state: ShardState

    @classmethod
    def take(cls, state: ShardState, lanes: Lanes, deadline: Deadline) -> HostCopy:
        """Copy a shard to the host and give its memory on the device back.

        Raises MemoryError, or torch's RuntimeError, when the host has no room, TransportError when the device
        does not answer in time; the shard is as it was then.
        """
        arenas = {kind: Arena(arena.shard, arena.dtype) for kind, arena in state.arenas.items()}
        copy = cls(vacated=state, state=ShardState(shard=state.shard, arenas=arenas))
        for kind, arena in state.arenas.items():
            if arena.device.type == "cuda":
                # Not torch's pinned memory, which comes in powers of two. Where the system refuses, copies
                # pass through buffers of the driver.
                lock_pages(arenas[kind].flat)
        _carry(state, copy.state, lanes, deadline)
        for arena in state.arenas.values():
            arena.vacate()
        return copy

    def put_back(self, lanes: Lanes, deadline: Deadline) -> None:
        """Fill the shard on the device again.

        Raises MemoryError, OSError, or torch's RuntimeError, when the device has no room, also once torch's
        own cache is empty, TransportError when it does not answer in time; the shard is of no worth then, and
        takes no memory, unless the device may still write to it.
        """
        arenas = list(self.vacated.arenas.values())
        try:
            _occupy(arenas)
        except (MemoryError, RuntimeError, OSError):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            _occupy(arenas)
        _carry(self.state, self.vacated, lanes, deadline)


def _occupy(arenas: Sequence[Arena]) -> None:
    """All of the arenas or none."""
    done: list[Arena] = []
    try:
        for arena in arenas:
            arena.occupy()
            done.append(arena)
    except (MemoryError, RuntimeError, OSError):
        for arena in done:
            arena.vacate()
        raise


def _carry(source: ShardState, target: ShardState, lanes: Lanes, deadline: Deadline) -> None:
    lanes.begin()
    for kind, arena in source.arenas.items():
        lanes.pack.carry(arena.flat, target.arenas[kind].flat)
    if not reached_in_time(lanes.end(), deadline):
        raise TransportError(
            explain(
                "cannot carry a shard between device and host in time",
                values=f"{source.num_bytes} bytes, deadline {deadline.allowed_s:.3g} s",
                rule="every move has a deadline",
                remedy="abort the epoch; the device may hang",
            )
        )
