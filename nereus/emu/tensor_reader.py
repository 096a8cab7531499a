"""Lazy reading of boxes out of safetensors files: headers are read at once, numbers only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nereus.emu.tensor import Box
from nereus.errors import NereusError, explain

FLOATS: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where one tensor lies, from the file's header. `dtype` is safetensors' name (BF16, F32, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorReader:
    """Reads boxes of the tensors in some safetensors files, which stay memory-mapped while it lives.

    `error` is the class raised, with the file named, for a file that is absent, cut short or not safetensors.
    """

    def __init__(self, files: list[Path], error: type[NereusError]) -> None:
        self._handles: dict[Path, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for file in files:
            handle = self._handles[file] = _open(file, error)
            for name in handle.keys():  # noqa: SIM118 (the handle is not a mapping)
                header = handle.get_slice(name)
                self.tensors[name] = Stored(
                    file=file, shape=tuple(header.get_shape()), dtype=header.get_dtype()
                )

    def read(self, name: str, box: Box) -> Tensor:
        """The box of one stored tensor, in its stored dtype. The box must lie inside the tensor's shape."""
        stored = self.tensors[name]
        assert all(0 <= lo <= hi <= n for (lo, hi), n in zip(box, stored.shape, strict=True)), (
            f"box {box} is outside of {name} {stored.shape}"
        )
        part: Tensor = self._handles[stored.file].get_slice(name)[tuple(slice(lo, hi) for lo, hi in box)]
        return part


def _open(file: Path, error: type[NereusError]) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except FileNotFoundError:
        raise error(explain(f"cannot read {file}", values="the file is absent")) from None
    except SafetensorError as problem:
        raise error(
            explain(
                f"cannot read {file}",
                values=str(problem),
                rule="it must be an undamaged safetensors file",
                remedy="fetch or write the file again",
            )
        ) from problem
