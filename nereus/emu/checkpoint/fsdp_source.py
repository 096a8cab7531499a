"""A folder of FSDP shards as a source: one file a rank, as verl writes them.

    model_world_size_W_rank_R.pt   theta: name -> DTensor of the rank's part (or a whole tensor)
    optim_world_size_W_rank_R.pt   a torch optimizer's state: number of the parameter -> moments, step
    huggingface/config.json        the model

Under FSDP2 moments are DTensors like their parameters, in the order of the model's. Under FSDP1 they are flat
pieces of wrapped modules, which do not say what they hold: they are `unread`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from nereus.emu.checkpoint.stored_boxes import Parts, check_names, read_box
from nereus.emu.checkpoint.torch_file import load
from nereus.emu.decoder import HEAD
from nereus.emu.tensor import Box, ModelSpec, box_size, whole
from nereus.errors import CheckpointError, explain

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
MOMENTS = ("exp_avg", "exp_avg_sq")
SCORE_BIAS = "score.bias"


class FsdpSource:
    """Logical tensors of a model in FSDP shards.

    Opening reads no numbers: tensors are mapped from the files. Raises CheckpointError, naming them, when
    files or tensors are absent, misshapen, or cut in a way that is not known.
    """

    def __init__(self, folder: Path | str, spec: ModelSpec) -> None:
        self.folder, self._spec = Path(folder), spec
        self._world = world_size(self.folder)
        held = self._load("model")
        self._parts: dict[str, dict[str, Parts]] = {"theta": _parts_by_name(held)}
        found = {name: tuple(tensor.shape) for name, tensor in held[0].items()}
        check_names(self.folder, spec, found, self._ignored(held))
        # A tied head is one parameter with the embedding, and named a second time.
        names = [name for name in held[0] if name in spec.by_name or name == SCORE_BIAS]
        self._steps: int | None = None
        self._read_moments(names)

    def __reduce__(self) -> tuple[object, ...]:
        return FsdpSource, (self.folder, self._spec)

    def kinds(self) -> tuple[str, ...]:
        """Kinds that are there for every tensor."""
        return tuple(self._parts)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {tensor.name: tensor.shape for tensor in self._spec.tensors}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The box of one logical tensor in its stored dtype. Raises CheckpointError when it is not stored."""
        parts = self._parts.get(kind, {}).get(name)
        if parts is None:
            raise CheckpointError(explain(f"cannot read {kind}/{name} from {self.folder}", rule="absent"))
        return read_box(parts, box)

    @property
    def unread(self) -> tuple[str, ...]:
        """Files of an optimizer whose state is no kind here."""
        if "exp_avg" in self._parts:
            return ()
        return tuple(sorted(path.name for path in self.folder.glob("optim_world_size_*_rank_*.pt")))

    def adam_steps(self) -> int | None:
        """Optimizer steps taken; None without moments."""
        return self._steps

    def _load(self, what: str) -> list[dict[str, Any]]:
        names = [f"{what}_world_size_{self._world}_rank_{rank}.pt" for rank in range(self._world)]
        absent = [name for name in names if not (self.folder / name).is_file()]
        if absent:
            raise CheckpointError(
                explain(
                    f"cannot read the shards in {self.folder}",
                    values=f"{', '.join(absent[:4])} absent",
                    rule=f"a world of {self._world} ranks writes as many files",
                    remedy="fetch the files of all nodes",
                )
            )
        return [load(self.folder / name) for name in names]

    def _ignored(self, held: list[dict[str, Any]]) -> list[str]:
        """A tied head, and a score's bias of zero: they carry nothing."""
        if SCORE_BIAS in held[0]:
            bias = read_box(self._parts["theta"][SCORE_BIAS], whole(tuple(held[0][SCORE_BIAS].shape)))
            if bias.any():
                raise CheckpointError(
                    explain(
                        f"cannot read the critic in {self.folder}",
                        values=f"{SCORE_BIAS} is {bias.tolist()}",
                        rule="a value head here has no bias",
                        remedy="start the critic from another model: models.critic",
                    )
                )
        return [name for name in (HEAD, SCORE_BIAS) if name not in self._spec.by_name]

    def _read_moments(self, names: list[str]) -> None:
        if not (self.folder / f"optim_world_size_{self._world}_rank_0.pt").is_file():
            return
        states: list[dict[int, dict[str, Any]]] = [one["state"] for one in self._load("optim")]
        first = states[0]
        numbered = [(at, name) for at, name in enumerate(names) if name in self._spec.by_name]
        if sorted(first) != list(range(len(names))) or any(
            tuple(first[at][kind].shape) != self._spec.by_name[name].shape
            for at, name in numbered
            for kind in MOMENTS
        ):
            return
        for kind in MOMENTS:
            named = [{name: state[at][kind] for at, name in numbered} for state in states]
            self._parts[kind] = _parts_by_name(named)
        self._steps = max(int(_local(first[at]["step"]).max()) for at in first)


def world_size(folder: Path) -> int:
    """The number of ranks that wrote the newest set of shards. Raises CheckpointError where there is none."""
    sizes = {int(found[1]) for path in folder.iterdir() if (found := SHARD.fullmatch(path.name))}
    if len(sizes) != 1:
        raise CheckpointError(
            explain(
                f"cannot read the shards in {folder}",
                values=f"world sizes {sorted(sizes)}" if sizes else "no model_world_size_W_rank_R.pt",
                rule="a folder holds the shards of one world",
                remedy="keep the files of the run that is meant",
            )
        )
    return sizes.pop()


def _parts_by_name(held: list[dict[str, Any]]) -> dict[str, Parts]:
    return {name: tuple(_parts(name, [one[name] for one in held])) for name in held[0]}


def _parts(name: str, tensors: list[Tensor]) -> Iterator[tuple[Box, Tensor]]:
    """The different boxes of a tensor, with what the ranks hold of it."""
    seen: set[Box] = set()
    for rank, tensor in enumerate(tensors):
        box = _box(name, tensor, rank)
        if box not in seen:
            seen.add(box)
            yield box, _local(tensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _box(name: str, tensor: Tensor, rank: int) -> Box:
    """Which part of the tensor a rank holds: torch cuts a dimension into equal parts, the last shorter."""
    box = list(whole(tuple(tensor.shape)))
    if not isinstance(tensor, DTensor):
        return tuple(box)
    mesh = tensor.device_mesh.mesh
    (place,) = (mesh == rank).nonzero().tolist()
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            lo, hi = box[placement.dim]
            size = -(-(hi - lo) // mesh.shape[axis])
            start = min(lo + place[axis] * size, hi)
            box[placement.dim] = (start, min(start + size, hi))
        elif not isinstance(placement, Replicate):
            raise _not_equal(name, f"placement {placement}")
    held = tuple(tensor._local_tensor.shape)
    if box_size(tuple(box)) != prod(held):
        raise _not_equal(name, f"rank {rank} holds {list(held)} at {box}")
    return tuple(box)


def _not_equal(name: str, values: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"cannot read {name}",
            values=values,
            rule="a shard is an equal part of its tensor, or all of it",
            remedy="merge the checkpoint into a Hugging Face folder with verl.model_merger",
        )
    )
