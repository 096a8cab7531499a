"""Which keys name files, and against which folder a relative one is resolved.

A relative path in a campaign file means "beside the campaign file", so that a folder with a campaign can be
moved or run from anywhere. A relative path on the command line means what it means in the shell: it counts
from the current directory, as `output` does always.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True)
class IsInputPath:
    """Marks a field whose value is a file or folder that the campaign reads."""


@dataclass(frozen=True, slots=True)
class IsFunction:
    """Marks a field whose value is `package.module:function` or `path/to/file.py:function`."""


@dataclass(frozen=True, slots=True)
class IsOutputPath:
    """Marks a field whose value is a folder that the campaign writes."""


InputPath = Annotated[str, IsInputPath()]
FunctionPath = Annotated[str, IsFunction()]
OutputPath = Annotated[str, IsOutputPath()]


def resolve_path(value: str, folder: Path) -> str:
    """The absolute path of `value`, which counts from `folder` when relative; `~` is the home folder."""
    return str((folder / Path(value).expanduser()).resolve())


def resolve_function(value: str, folder: Path) -> str:
    """`value` with its file made absolute; `package.module:function` stays as it is."""
    file, colon, name = value.rpartition(":")
    return f"{resolve_path(file, folder)}:{name}" if colon and file.endswith(".py") else value
