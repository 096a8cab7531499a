"""Carrying out moves between meshes: one collective call a tensor, by `nccl.m2n` where it is installed.

    each group of ranks (a mesh and the one it feeds) ──▶ one communicator, ranks in the order of the meshes
    each tensor                                       ──▶ one call, into a lane; nothing is packed or staged

The library comes with `nccl-extensions` and needs NCCL 2.30.5 or later, the one that torch has loaded. Not
run on hardware yet; what is asked of it is tested with a resharder of the tests' own.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nereus.emu.arena import TORCH_DTYPE, ShardState
from nereus.emu.lanes import Lanes
from nereus.emu.layout import Rank
from nereus.emu.mesh_moves import MeshMove, MeshSide
from nereus.emu.rank_plan import RankPlan
from nereus.emu.tensor import Box
from nereus.emu.transport.protocol import Deadline, reached_in_time
from nereus.errors import InvalidOperation, TransportError, explain

MODULE = "nccl.m2n"
LEAST_NCCL = (2, 30, 5)


class Resharder(Protocol):
    """Moves tensors between meshes."""

    def reshard(
        self, source: Tensor | None, target: Tensor | None, move: MeshMove, communicator: Any
    ) -> None:
        """Fill `target` of the target's ranks from `source` of the source's, contiguous both; collective.

        The work goes into the current stream.
        """
        ...


@dataclass(frozen=True, eq=False)
class M2nResharder:
    """By NVIDIA's library."""

    module: Any
    device: torch.device

    @classmethod
    def load(cls, device: torch.device) -> M2nResharder:
        """Raises InvalidOperation where the library is absent, or NCCL older than it needs."""
        found = torch.cuda.nccl.version() if device.type == "cuda" else ()  # type: ignore[no-untyped-call]
        why = ""
        if device.type != "cuda" or torch.version.hip:
            why = f"device {device}"
        elif tuple(found) < LEAST_NCCL:
            why = f"torch has NCCL {'.'.join(map(str, found))}"
        else:
            try:
                return cls(importlib.import_module(MODULE), device)
            except ImportError as error:
                why = str(error)
        raise InvalidOperation(
            explain(
                "cannot move weights by nccl.m2n",
                values=why,
                rule="it needs NVIDIA GPUs, NCCL 2.30.5 or later, and the package nccl-extensions",
                remedy="install it, or leave NEREUS_M2N unset",
            )
        )

    def reshard(
        self, source: Tensor | None, target: Tensor | None, move: MeshMove, communicator: Any
    ) -> None:
        """See Resharder."""
        dtype = TORCH_DTYPE[move.dtype]
        self.module.reshard(
            source,
            target,
            communicator._comm_ptr(),
            torch.cuda.current_stream(self.device),
            src_mesh=self._mesh(move.source, 0),
            src_placements=self._placements(move.source),
            src_local_shape=move.source.shape,
            src_dtype=dtype,
            dst_mesh=self._mesh(move.target, len(move.source.ranks)),
            dst_placements=self._placements(move.target),
            dst_local_shape=move.target.shape,
            dst_dtype=dtype,
        )

    def _mesh(self, side: MeshSide, start_rank: int) -> Any:
        return self.module.Mesh((side.num_replicas, side.num_shards), start_rank=start_rank)

    def _placements(self, side: MeshSide) -> list[Any]:
        return [self.module.Replicate(), self.module.Shard(side.dim)]


class Connect(Protocol):
    """Makes communicators."""

    def __call__(
        self, ranks: Sequence[Rank], order: tuple[Rank, ...], *, epoch: int, digest: str, deadline: Deadline
    ) -> Any:
        """That of `order`, some of the plan's `ranks`: a rank's number in it is its place there. Collective
        over `order`. Raises TransportError.
        """
        ...


@dataclass(eq=False)
class MeshMover:
    """Runs rank plans that consist of moves between meshes."""

    connect: Connect
    resharder: Resharder
    lanes: Lanes

    def run(
        self,
        plan: RankPlan,
        old: ShardState | None,
        new: ShardState | None,
        *,
        epoch: int,
        deadline: Deadline,
    ) -> int:
        """Move; collective over `plan.ranks`. Returns the bytes that this rank sent, its share where replicas
        share the sending. Raises TransportError when it does not end in time.

        Moves come in one order on all ranks, so that no two wait for each other in different communicators.
        """
        orders = dict.fromkeys(move.ranks for move in plan.meshes)
        communicators = {
            order: self.connect(plan.ranks, order, epoch=epoch, digest=plan.digest, deadline=deadline)
            for order in orders
        }
        for state in (old, new):
            for arena in () if state is None else state.arenas.values():
                self.lanes.keep(arena.flat)
        self.lanes.begin()
        sent_bytes = 0
        for move in plan.meshes:
            source = _view(old, move.move.source.name, move.source.place(plan.rank))
            target = _view(new, move.move.target.name, move.target.place(plan.rank))
            call = partial(self.resharder.reshard, source, target, move, communicators[move.ranks])
            self.lanes.wire.give(call)
            if source is not None:
                size = source.numel() * source.element_size()
                sent_bytes += size * move.target.num_replicas // move.source.num_replicas
        if not reached_in_time(self.lanes.end(), deadline):
            raise TransportError(
                explain(
                    f"worker {plan.rank} waited for its moves between meshes",
                    values=f"deadline {deadline.allowed_s:.3g} s",
                    rule="every transfer has a deadline",
                    remedy="abort the epoch and continue without the workers that died",
                )
            )
        return sent_bytes


def _view(state: ShardState | None, kind: str, place: tuple[str, Box] | None) -> Tensor | None:
    if state is None or place is None:
        return None
    physical, stored = place
    return state[kind].views[physical][tuple(slice(lo, hi) for lo, hi in stored)]
