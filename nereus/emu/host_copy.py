"""A shard in host memory while new shards take its place on the device: what a spill leaves, and takes back.

    device: vacated ◀──put back (abort)──┐
       │ take                            │
       ▼                                 │
    host: the same numbers, from which the transition's operations read ──drop (commit)──▶ nothing

The tensors on the device keep their place, so an engine that holds them goes on after an abort. On a GPU the
host's memory is locked, so that copies run at the speed of the link and nobody waits for them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.emu.arena import Arena, ShardState
from nereus.emu.lanes import Lanes
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
                _lock(arenas[kind].flat)
        _carry(state, copy.state, lanes, deadline)
        for arena in state.arenas.values():
            arena.vacate()
        return copy

    def put_back(self, lanes: Lanes, deadline: Deadline) -> None:
        """Fill the shard on the device again.

        Raises MemoryError, or torch's RuntimeError, when the device has no room, TransportError when it does
        not answer in time; the shard is of no worth then.
        """
        for arena in self.vacated.arenas.values():
            arena.occupy()
        _carry(self.state, self.vacated, lanes, deadline)


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


def _lock(flat: Tensor) -> None:
    """Lock its pages until it is gone. Where the system refuses, copies pass through the driver's buffers.

    Not torch's pinned memory, which comes in powers of two.
    """
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, num_bytes = flat.data_ptr(), flat.numel() * flat.element_size()
    if num_bytes and int(driver.cudaHostRegister(address, num_bytes, 0)) == 0:
        weakref.finalize(flat, driver.cudaHostUnregister, address)
