"""The folder of checkpoints: names, which are committed, which are intact, and which are old enough to go."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from nereus.emu.tensor_writer import FileSum, sum_file, sync_folder
from nereus.errors import CheckpointError, explain

MARKER = "COMMIT"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")


def step_folder(root: Path | str, step: int) -> Path:
    """Where the checkpoint after `step` steps lies once committed."""
    return Path(root) / f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name, also with a suffix such as `.tmp`; None for other names."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def committed(root: Path | str) -> tuple[Path, ...]:
    """The committed checkpoints, oldest first. Half-written ones are not among them."""
    folder = Path(root)
    if not folder.is_dir():
        return ()
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return tuple(sorted(found, key=lambda path: step_of(path.name) or 0))


def read_marker(path: Path) -> dict[str, FileSum]:
    """Every file of a checkpoint with the size and checksum it was written with. Raises CheckpointError."""
    try:
        raw = json.loads((path / MARKER).read_text())
        if raw["format"] == FORMAT:
            return {name: FileSum(size_bytes=size, crc32=crc) for name, (size, crc) in raw["files"].items()}
        problem = f"format {raw['format']}, this version reads {FORMAT}"
    except FileNotFoundError:
        problem = f"it has no {MARKER} file, so its writing was not finished"
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        problem = f"its {MARKER} file is unreadable ({error!r})"
    raise CheckpointError(_damage_message(path, problem))


def damage(path: Path, *, checksums: bool) -> str | None:
    """What is wrong with a committed checkpoint, None when it is intact. Without `checksums`, sizes alone."""
    for name, expected in read_marker(path).items():
        file = path / name
        if not file.is_file():
            return f"{name} is absent"
        size = file.stat().st_size
        if size != expected.size_bytes:
            return f"{name} has {size} bytes, not {expected.size_bytes}"
        if checksums and (actual := sum_file(file)) != expected:
            return f"{name} has checksum {actual.crc32:08x}, not {expected.crc32:08x}"
    return None


def verify(path: Path, *, checksums: bool) -> None:
    """Raise CheckpointError, naming the newest intact other checkpoint as the remedy, if this is damaged."""
    if problem := damage(path, checksums=checksums):
        raise CheckpointError(_damage_message(path, problem))


def latest(root: Path | str, *, checksums: bool = True) -> Path | None:
    """The newest committed checkpoint, verified; None when there is none.

    A damaged newest one raises CheckpointError, which names the intact one before it: going back silently
    would lose steps without a word.
    """
    found = committed(root)
    if not found:
        return None
    verify(found[-1], checksums=checksums)
    return found[-1]


def prune(root: Path | str, keep_last: int) -> tuple[Path, ...]:
    """Delete all but the newest `keep_last` committed checkpoints; returns those deleted.

    Each loses its name first, so that a deletion cut short leaves nothing that looks like a checkpoint.
    """
    assert keep_last >= 1, "the newest checkpoint is never deleted"
    doomed = committed(root)[:-keep_last]
    for path in doomed:
        discard(path)
    return doomed


def discard(path: Path) -> None:
    """Delete a checkpoint's folder in a way that never leaves a half of it under its name."""
    grave = path.with_name(f"{path.name}.old")
    shutil.rmtree(grave, ignore_errors=True)
    path.rename(grave)
    sync_folder(path.parent)
    shutil.rmtree(grave)


def _damage_message(path: Path, problem: str) -> str:
    remedy = "no other intact checkpoint lies beside it; start afresh"
    for other in reversed(committed(path.parent)):
        if other != path and _is_intact(other):
            remedy = f"use the intact {other}"
            break
    return explain(
        f"cannot use the checkpoint {path}", values=problem, rule="it must be whole", remedy=remedy
    )


def _is_intact(path: Path) -> bool:
    try:
        raw = json.loads((path / MARKER).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return raw.get("format") == FORMAT and damage(path, checksums=True) is None
