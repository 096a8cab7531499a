"""Logical tensors of which files hold boxes: read by intersection, checked against the model. Pure but for
the files behind the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nereus.emu.tensor import Box, ModelSpec, box_shape, box_size, intersect
from nereus.errors import CheckpointError, explain

Parts = Sequence[tuple[Box, Tensor]]
_SHOWN = 4


def read_box(parts: Parts, box: Box) -> Tensor:
    """The box of a tensor from the parts that it meets; its dtype is theirs.

    Raises CheckpointError where the parts do not cover it.
    """
    out = torch.empty(box_shape(box), dtype=parts[0][1].dtype)
    done: list[Box] = []
    for stored, tensor in parts:
        common = intersect(stored, box)
        if box_size(common) and common not in done:  # replicas hold the same
            done.append(common)
            out[_within(common, box)] = tensor[_within(common, stored)]
    if sum(map(box_size, done)) != box_size(box):
        raise CheckpointError(
            explain("cannot read a tensor", values=f"{box} is covered by {done}", rule="parts cover it")
        )
    return out


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(inner, outer, strict=True))


def check_names(
    folder: Path, spec: ModelSpec, found: Mapping[str, tuple[int, ...]], ignored: Sequence[str] = ()
) -> None:
    """Raise CheckpointError, naming them, unless exactly the model's tensors are there in their shapes.

    Names in `ignored` may be there, too.
    """
    missing = [tensor.name for tensor in spec.tensors if tensor.name not in found]
    misshapen = [
        f"{name} is {list(found[name])}, not {list(tensor.shape)}"
        for name, tensor in spec.by_name.items()
        if name in found and found[name] != tensor.shape
    ]
    unexpected = [name for name in found if name not in spec.by_name and name not in ignored]
    parts = (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected))
    if problems := [f"{len(names)} {label}: {', '.join(names[:_SHOWN])}" for label, names in parts if names]:
        raise CheckpointError(
            explain(
                f"cannot read the model in {folder}",
                values="; ".join(problems),
                rule="it must hold the tensors that config.json describes",
                remedy="give the config.json of the model that was saved; for a critic --head value",
            )
        )
