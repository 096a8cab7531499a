"""Megatron-core as a way to change layout: its resharding (weights API) and its distributed checkpoints.

Runs on a CPU with shims for the CUDA calls that it makes whatever the device. The resharding API moves the
parameters of two modules; here each kind of state is a parameter, unfused, a view of the live arena, so
Megatron moves the same bytes. Ranks are placed contiguously, as Megatron's own parallel state places them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.reshard_cases import MODEL
from benchmarks.reshard_methods import Move, Setup
from nereus.emu.arena import ShardState
from nereus.emu.tensor import Replicated
from nereus.emu.unit import Unit

INSTALLED = find_spec("megatron") is not None


class _Stream:
    """Stands for a CUDA stream where there is none."""

    def wait_stream(self, other: object) -> None:
        """Nothing runs apart from the caller."""


def shim() -> None:
    """Point the CUDA calls of Megatron's gloo path at nothing."""
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_, **__: _Stream()  # type: ignore[assignment,return-value]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    warnings.filterwarnings("ignore")


class _Groups:
    """The groups that Megatron reads of a module: tp, dp and pp of this rank."""

    def __init__(self, units: Sequence[Unit], rank: int) -> None:
        layouts = [unit.layout for unit in units]
        self.tp = self.dp = self.pp = None
        for layout in layouts:
            for stage in range(layout.pp):
                self.tp = _group(layout.tp_group(stage), rank) or self.tp
            for position in range(layout.tp):
                self.pp = _group(layout.pp_group(position), rank) or self.pp
        for index in range(layouts[0].world_size):
            self.dp = _group(tuple(layout.ranks[index] for layout in layouts), rank) or self.dp


def _group(ranks: tuple[int, ...], rank: int) -> Any:
    group = dist.new_group(list(ranks), sort_ranks=False)
    return group if rank in ranks else None


class _Holder(nn.Module):
    """A shard's pieces as parameters under their logical names."""

    def __init__(self, units: Sequence[Unit], groups: _Groups, rank: int) -> None:
        super().__init__()
        self.pg_collection = groups
        self.config = _Config()
        self._member = any(rank in unit.ranks for unit in units)

    def hold(self, state: ShardState | None) -> _Holder:
        """Take the arenas of a shard."""
        if state is None or not self._member:
            return self
        for kind, arena in state.arenas.items():
            for piece in state.shard.pieces:
                spec = MODEL.by_name[piece.logical]
                parameter = nn.Parameter(arena.piece(piece), requires_grad=False)
                cut = not isinstance(spec.cut, Replicated)
                parameter.tensor_model_parallel = cut
                # The q, k, v, gate, up and embedding rows are cut on dim 0; out and down on dim 1.
                parameter.partition_dim = 1 if ".o_proj." in spec.name or ".down_proj." in spec.name else 0
                parameter.partition_stride = 1
                self.register_parameter(f"{kind}/{piece.logical}".replace(".", "/"), parameter)
        return self


class _Config:
    num_moe_experts = None


def resharding(setup: Setup) -> Move:
    """`megatron.core.resharding` over its gloo copy service; the plan is built once, before the clock."""
    from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    before = _Groups(setup.plan.old, setup.rank)
    after = _Groups(setup.plan.new, setup.rank)
    source = _Holder(setup.plan.old, before, setup.rank).hold(setup.old)
    service = GlooCopyService()
    plans: list[Any] = []

    def move(new: ShardState | None) -> int:
        kept = setup.mine.old == setup.mine.new
        target = _Holder(setup.plan.new, after, setup.rank).hold(None if kept else new)
        if not plans:
            plans.append(build_centralized_reshard_plan(source, target))
        execute_reshard_plan(plans[0], source, target, service)
        parameters = dict(target.named_parameters())
        return sum(
            parameters[op.param_name].data[op.my_slice].numel() * parameters[op.param_name].element_size()
            for op in plans[0].recv_ops
            if op.peer_rank != setup.rank
        )

    return move


def sharded(units: Sequence[Unit], rank: int, state: ShardState | None) -> dict[str, Any]:
    """The rank's part as Megatron's sharded tensors."""
    from megatron.core.dist_checkpointing import ShardedTensor

    mine = next(((dp, unit) for dp, unit in enumerate(units) if rank in unit.ranks), None)
    if mine is None or state is None:
        return {}
    dp, unit = mine
    at = unit.layout.position(rank)
    out: dict[str, Any] = {}
    for kind, arena in state.arenas.items():
        for piece in state.shard.pieces:
            shape = MODEL.by_name[piece.logical].shape
            offsets = [
                (dim, lo // (hi - lo), shape[dim] // (hi - lo))
                for dim, (lo, hi) in enumerate(piece.box)
                if hi - lo != shape[dim]
            ]
            key = f"{kind}.{piece.logical}"
            replica = (0, 0 if offsets else at.tp, dp)
            out[key] = ShardedTensor.from_rank_offsets(key, arena.piece(piece), *offsets, replica_id=replica)
    return out


def dist_checkpointing(root: str, setup: Setup) -> Move:
    """`megatron.core.dist_checkpointing`: save under the old layout, load under the new one."""
    from megatron.core import dist_checkpointing as checkpoints

    folder = Path(root) / f"mcp-{setup.folder}"

    def move(new: ShardState | None) -> int:
        if setup.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            checkpoints.save(sharded(setup.plan.old, setup.rank, setup.old), str(folder))
            # Replicas that are kept load nothing, which the check of full coverage would refuse.
            wanted = sharded(setup.plan.new, setup.rank, new)
            loaded = checkpoints.load(wanted, str(folder), validate_access_integrity=False)
        if new is not None:
            for kind, arena in new.arenas.items():
                for piece in new.shard.pieces:
                    arena.piece(piece).copy_(loaded[f"{kind}.{piece.logical}"])
        written = sum(file.stat().st_size for file in folder.iterdir()) if setup.rank == 0 else 0
        dist.barrier()
        if setup.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return written + (0 if new is None else new.num_bytes)

    return move
