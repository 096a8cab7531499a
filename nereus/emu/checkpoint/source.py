"""Reading a checkpoint: the control record, and each model as a lazy source for shards of any layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nereus.emu.checkpoint.commit import CONTROL, INDEX
from nereus.emu.checkpoint.control import Control
from nereus.emu.checkpoint.folder import read_marker, verify
from nereus.emu.checkpoint.part import Entry
from nereus.emu.tensor import Box, Interval, ModelSpec, box_shape, box_size, intersect
from nereus.emu.tensor_reader import TensorReader
from nereus.errors import CheckpointError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed, verified checkpoint: where it lies, its control record, and the models in it."""

    path: Path
    control: Control
    models: tuple[str, ...]

    def source(self, model: str) -> CheckpointSource:
        """The tensors of one model. Raises CheckpointError when it is not in this checkpoint."""
        if model not in self.models:
            raise CheckpointError(
                explain(
                    f"cannot resume {model} from {self.path}",
                    values=f"it holds {', '.join(self.models)}",
                    rule="a model is resumed from a checkpoint that has it",
                )
            )
        return CheckpointSource(self.path / model)


def open_checkpoint(path: Path | str, *, checksums: bool = True) -> Checkpoint:
    """Open a committed checkpoint. The driver verifies checksums once; workers may ask for sizes alone.

    Raises CheckpointError when it is half-written or damaged; the message names an intact one beside it.
    """
    folder = Path(path)
    verify(folder, checksums=checksums)
    models = sorted(
        name.removesuffix(f"/{INDEX}") for name in read_marker(folder) if name.endswith(f"/{INDEX}")
    )
    control = Control.from_json((folder / CONTROL).read_text())
    return Checkpoint(path=folder, control=control, models=tuple(models))


class CheckpointSource:
    """One model's stored tensors: reads the boxes asked for and touches no others."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            raw: dict[str, Any] = json.loads((self.folder / INDEX).read_text())
        except (OSError, json.JSONDecodeError) as problem:
            raise CheckpointError(
                explain(f"cannot read the checkpoint {self.folder}", values=str(problem))
            ) from problem
        self._shapes = {name: tuple(shape) for name, shape in raw["shapes"].items()}
        self._dtypes: dict[str, torch.dtype] = {
            kind: getattr(torch, name) for kind, name in raw["dtypes"].items()
        }
        self._boxes: dict[str, dict[str, list[tuple[Box, str]]]] = {
            kind: {name: [(_box(box), file) for box, file in held] for name, held in by_name.items()}
            for kind, by_name in raw["boxes"].items()
        }
        files = {file for by_name in self._boxes.values() for held in by_name.values() for _, file in held}
        self._reader = TensorReader([self.folder / file for file in sorted(files)], CheckpointError)

    def __reduce__(self) -> tuple[object, ...]:
        return CheckpointSource, (self.folder,)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of state stored; at least `theta`."""
        return tuple(self._dtypes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return self._shapes

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """A box of one logical tensor in its stored dtype, put together from the stored boxes it meets.

        Raises CheckpointError when the kind or the tensor is not stored.
        """
        held = self._boxes.get(kind, {}).get(name)
        if held is None:
            raise CheckpointError(
                explain(
                    f"cannot read {kind}/{name} from {self.folder}",
                    values=f"kinds {', '.join(self._dtypes)}; {len(self._shapes)} tensors",
                    rule="it is not stored",
                )
            )
        meeting = [(stored, common) for stored, _ in held if box_size(common := intersect(stored, box))]
        if len(meeting) == 1:
            return self._part(kind, name, *meeting[0])
        out = torch.empty(box_shape(box), dtype=self._dtypes[kind])
        for stored, common in meeting:
            out[_within(common, box)] = self._part(kind, name, stored, common)
        return out

    def check(self, spec: ModelSpec) -> None:
        """Raise CheckpointError, naming the differences, unless the stored tensors are the model's."""
        wanted = {name: tensor.shape for name, tensor in spec.by_name.items()}
        if wanted != self._shapes:
            both = sorted(wanted.keys() | self._shapes.keys())
            differing = [name for name in both if wanted.get(name) != self._shapes.get(name)]
            shown = "; ".join(
                f"{name}: stored {self._shapes.get(name)}, wanted {wanted.get(name)}"
                for name in differing[:4]
            )
            raise CheckpointError(
                explain(
                    f"cannot resume from {self.folder}",
                    values=f"{len(differing)} tensors differ: {shown}",
                    rule="the checkpoint must be of the same model",
                    remedy="resume with the model that was running, or start afresh",
                )
            )

    def _part(self, kind: str, name: str, stored: Box, common: Box) -> Tensor:
        key = Entry(kind=kind, logical=name, box=stored).key
        local = tuple((lo - at, hi - at) for (lo, hi), (at, _) in zip(common, stored, strict=True))
        return self._reader.read(key, local)


def kinds_to_fill(state_kinds: Iterable[str], source: CheckpointSource) -> dict[str, str]:
    """From which stored kind each kind of a state is filled; `grad` is not.

    Half-precision weights have an fp32 master beside them and fp32 weights are their own; a checkpoint may
    come from the other case. Then master is filled from theta, and the theta of a training state without a
    master is filled from the stored master, which has the bits that theta lost. Raises CheckpointError when
    a kind is wanted and not stored.
    """
    wanted, stored = [kind for kind in state_kinds if kind != "grad"], source.kinds()
    choice = {kind: kind for kind in wanted}
    if "master" in wanted and "master" not in stored:
        choice["master"] = "theta"
    if "master" in stored and "master" not in wanted and "exp_avg" in wanted:
        choice["theta"] = "master"
    if absent := [kind for kind in choice.values() if kind not in stored]:
        raise CheckpointError(
            explain(
                f"cannot resume from {source.folder}",
                values=f"{', '.join(absent)} wanted, stored are {', '.join(stored)}",
                rule="a training state needs its moments",
                remedy="use a checkpoint that a training unit wrote",
            )
        )
    return choice


def _box(raw: Iterable[Iterable[int]]) -> Box:
    return tuple(_interval(*pair) for pair in raw)


def _interval(lo: int, hi: int) -> Interval:
    return lo, hi


def _within(common: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(common, box, strict=True))
