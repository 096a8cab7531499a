"""A file of `torch.save` read without running what it says.

Such a file is a pickle, which can call anything. Only tensors and plain values are made from it; objects of
a trainer's own classes, where they are expected, come as `Inert`. Any other class is refused by its name.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.tensor  # lets torch make DTensors from files

from nereus.errors import CheckpointError, explain

_SHOWN = 4


class Inert:
    """Stands for an object of a class that is not loaded; it does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Takes and forgets whatever the class was made with."""
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        """As above."""

    def __setstate__(self, state: object) -> None:
        """Forgets the state."""


def load(path: Path, *, inert: Sequence[str] = ()) -> Any:
    """What the file holds, tensors mapped from it. Classes of the packages in `inert` come as `Inert`.

    Raises CheckpointError for a file that is none of torch's or that holds objects of other classes.
    """
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in unknown if name.partition(".")[0] not in inert]
        if foreign:
            raise _refused(path, foreign)
        with torch.serialization.safe_globals([(Inert, name) for name in unknown]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as problem:
        raise CheckpointError(
            explain(
                f"cannot read {path}",
                values=str(problem).splitlines()[0],
                rule="it is read as a file of torch.save that holds tensors and plain values",
                remedy="fetch or write the checkpoint again",
            )
        ) from problem


def _refused(path: Path, foreign: Sequence[str]) -> CheckpointError:
    shown = ", ".join(foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
    sharded = any("ShardedTensor" in name for name in foreign)
    return CheckpointError(
        explain(
            f"will not read {path}",
            values=f"it holds objects of {shown}",
            rule="loading those would run code from the file; only tensors and plain values are read",
            remedy="save it with a newer torch, which writes DTensors"
            if sharded
            else "export the model as a Hugging Face folder with the trainer that wrote it",
        )
    )
