"""torch.distributed.checkpoint as a way to change layout: save under the old one, load under the new one.

Every logical tensor is a DTensor over its stage's (dp, tp) mesh. Its local part is a view of the live arena,
so that saving and loading need no copy of ours. The folder is on /dev/shm or on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.reshard_cases import MODEL
from benchmarks.reshard_methods import Move, Setup
from nereus.emu.arena import ShardState
from nereus.emu.unit import Unit


def meshes(units: Sequence[Unit]) -> list[DeviceMesh]:
    """One (dp, tp) mesh for each pipeline stage; collective over the world."""
    layouts = [unit.layout for unit in units]
    return [
        DeviceMesh("cpu", torch.tensor([layout.tp_group(stage) for layout in layouts]))
        for stage in range(layouts[0].pp)
    ]


def state_dict(
    units: Sequence[Unit], stages: list[DeviceMesh], rank: int, state: ShardState | None
) -> dict[str, DTensor]:
    """The rank's part as DTensors by `kind.logical name`."""
    mine = next((unit for unit in units if rank in unit.ranks), None)
    if mine is None or state is None:
        return {}
    mesh = stages[mine.layout.position(rank).pp]
    out: dict[str, DTensor] = {}
    for kind, arena in state.arenas.items():
        for piece in state.shard.pieces:
            shape = MODEL.by_name[piece.logical].shape
            cut = [dim for dim, (lo, hi) in enumerate(piece.box) if hi - lo != shape[dim]]
            placements = [Replicate(), Shard(cut[0]) if cut else Replicate()]
            stride = torch.empty(shape, device="meta").stride()
            local = arena.piece(piece)
            out[f"{kind}.{piece.logical}"] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
            )
    return out


def through(root: str, setup: Setup) -> Move:
    """Save and load through a folder under `root`."""
    folder = Path(root) / f"dcp-{setup.folder}"
    before, after = meshes(setup.plan.old), meshes(setup.plan.new)

    def move(new: ShardState | None) -> int:
        if setup.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        dcp.save(state_dict(setup.plan.old, before, setup.rank, setup.old), checkpoint_id=folder)
        dcp.load(state_dict(setup.plan.new, after, setup.rank, new), checkpoint_id=folder)
        written = sum(file.stat().st_size for file in folder.iterdir()) if setup.rank == 0 else 0
        return written + (0 if new is None else new.num_bytes)

    return move


def remove(root: str, setup: Setup) -> None:
    """Delete the folder."""
    if setup.rank == 0:
        shutil.rmtree(Path(root) / f"dcp-{setup.folder}", ignore_errors=True)
