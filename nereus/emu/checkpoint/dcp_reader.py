"""Boxes out of a torch distributed-checkpoint folder (`.metadata` and `*.distcp`), without a process group.

Only the stored chunks that a box meets are read. The format's index is a pickle: open folders you trust.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nereus.emu.tensor import Box, box_shape, box_size
from nereus.errors import CheckpointError, explain

METADATA = ".metadata"


class DcpReader:
    """The tensors of one folder by their stored names."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not (self.folder / METADATA).is_file():
            raise CheckpointError(
                explain(
                    f"cannot read {self.folder}",
                    values=f"it has no {METADATA} file",
                    rule="torch writes it last, so a folder without it is no finished distributed checkpoint",
                    remedy="give the folder that was passed to torch.distributed.checkpoint.save",
                )
            )
        self._reader = FileSystemReader(self.folder)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __reduce__(self) -> tuple[object, ...]:
        return DcpReader, (self.folder,)

    @property
    def names(self) -> tuple[str, ...]:
        """Stored names of all tensors."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a stored tensor."""
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return self._tensors[name].properties.dtype

    def read(self, name: str, box: Box) -> Tensor:
        """The box of one stored tensor in its stored dtype.

        Raises CheckpointError when the stored chunks do not cover it or a file cannot be read.
        """
        entry = self._tensors[name]
        out = torch.empty(box_shape(box), dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(
            offsets=torch.Size([lo for lo, _ in box]), sizes=torch.Size(box_shape(box))
        )
        items = create_read_items_for_chunk_list(name, entry, [chunk])
        planner = _IntoTensor(out)
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except (OSError, RuntimeError) as problem:
            raise CheckpointError(
                explain(
                    f"cannot read {name} from {self.folder}",
                    values=str(problem),
                    rule="every chunk's file must be there and whole",
                    remedy="fetch or write the checkpoint again",
                )
            ) from problem
        if planner.num_elements != box_size(box):
            raise CheckpointError(
                explain(
                    f"cannot read {name}{list(box)} from {self.folder}",
                    values=f"stored chunks hold {planner.num_elements} of {box_size(box)} elements",
                    rule="the chunks must cover every tensor",
                )
            )
        return out


class _IntoTensor(LoadPlanner):
    """Receives the chunks that meet a box."""

    def __init__(self, out: Tensor) -> None:
        self._out = out
        self.num_elements = 0

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the result that a chunk fills."""
        target = self._out
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Count what arrived."""
        self.num_elements += tensor.numel()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to set up: the box is the plan."""

    def create_local_plan(self) -> LoadPlan:
        """Never called: the plan is made beside it."""
        raise AssertionError("a box is read by its own plan")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Plans of other ranks are as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan is as it was."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: only tensors are asked for."""
        raise AssertionError(f"{read_item} is no tensor")
