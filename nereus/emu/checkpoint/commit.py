"""The driver's half of writing a checkpoint: open a temporary folder, check the parts, make it count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus.emu.checkpoint.control import Control
from nereus.emu.checkpoint.folder import FORMAT, MARKER, committed, discard, prune, step_folder, step_of
from nereus.emu.checkpoint.ownership import uncovered
from nereus.emu.checkpoint.part import Part
from nereus.emu.tensor import Box, ModelSpec
from nereus.emu.tensor_writer import FileSum, sync_folder, write_text
from nereus.errors import CheckpointError, explain

INDEX = "index.json"
CONTROL = "control.json"


def begin(root: Path | str, step: int) -> Path:
    """Make the empty temporary folder of a checkpoint, removing one that an earlier attempt left."""
    final = step_folder(root, step)
    folder = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(
    folder: Path,
    specs: Mapping[str, ModelSpec],
    parts: Sequence[Part],
    control: Control,
    *,
    keep_last: int | None = None,
) -> Path:
    """Turn a temporary folder with all its parts into a checkpoint; returns its final path.

    `specs` names every model in it. Indexes, the control record and the COMMIT file with all checksums are
    written and flushed in this order, then the folder is renamed: a crash before the rename leaves nothing
    that `latest` would pick. Older checkpoints beyond `keep_last` are deleted after it. A checkpoint of the
    same step is replaced.

    Raises CheckpointError, and leaves the temporary folder for inspection, when the parts do not cover every
    tensor exactly once or a file is not visible from here.
    """
    sums: dict[str, FileSum] = {}
    for model, spec in specs.items():
        mine = [part for part in parts if part.model == model]
        index = _index(model, spec, mine)
        for part in mine:
            _check_visible(folder, part)
            sums[f"{model}/{part.file}"] = part.sum
        sums[f"{model}/{INDEX}"] = write_text(folder / model / INDEX, index)
        sync_folder(folder / model)
    sums[CONTROL] = write_text(folder / CONTROL, control.to_json())
    listing = {name: (sums[name].size_bytes, sums[name].crc32) for name in sorted(sums)}
    write_text(folder / MARKER, json.dumps({"format": FORMAT, "files": listing}, indent=2) + "\n")
    sync_folder(folder)
    final = step_folder(folder.parent, control.step)
    assert folder.name == f"{final.name}.tmp", f"{folder} was not begun for step {control.step}"
    if final.exists():
        discard(final)
    folder.rename(final)
    sync_folder(final.parent)
    if keep_last is not None:
        prune(final.parent, keep_last)
    return final


def abandon(root: Path | str) -> tuple[Path, ...]:
    """Delete what crashed writers left behind, older than the newest checkpoint; returns those deleted.

    Only the driver that owns `root` may call it, between checkpoints.
    """
    newest = max((step_of(path.name) or 0 for path in committed(root)), default=-1)
    left = [path for path in Path(root).glob("step-*.*") if path.suffix in (".tmp", ".old")]
    gone = tuple(path for path in left if (step_of(path.name) or 0) <= newest)
    for path in gone:
        shutil.rmtree(path)
    return gone


def _index(model: str, spec: ModelSpec, parts: Sequence[Part]) -> str:
    """The model's index: shapes, dtype of each kind, and for every kind and tensor its boxes and files."""
    kinds = dict(parts[0].dtypes) if parts else {}
    boxes: dict[str, dict[str, list[tuple[Box, str]]]] = {kind: {} for kind in kinds}
    for part in parts:
        if dict(part.dtypes) != kinds:
            raise _misfit(model, f"{part.file} holds {part.dtypes}, {parts[0].file} {parts[0].dtypes}")
        for entry in part.entries:
            boxes[entry.kind].setdefault(entry.logical, []).append((entry.box, part.file))
    if "theta" not in kinds:
        raise _misfit(model, f"it holds {sorted(kinds) or 'nothing'}, no theta")
    for kind, by_name in boxes.items():
        for name, tensor in spec.by_name.items():
            if problem := uncovered(tensor.shape, [box for box, _ in by_name.get(name, [])]):
                raise _misfit(model, f"{kind}/{name}: {problem}")
    document: dict[str, Any] = {
        "shapes": {name: list(tensor.shape) for name, tensor in spec.by_name.items()},
        "dtypes": kinds,
        "boxes": boxes,
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _misfit(model: str, problem: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"cannot commit the checkpoint of {model}",
            values=problem,
            rule="every rank of one unit must write its part, so that each tensor is there exactly once",
            remedy="the previous checkpoint still holds; write this one again",
        )
    )


def _check_visible(folder: Path, part: Part) -> None:
    file = folder / part.model / part.file
    size, wrote = (file.stat().st_size if file.is_file() else None), part.sum.size_bytes
    if size != wrote:
        raise CheckpointError(
            explain(
                f"cannot commit {folder}",
                values=f"{part.model}/{part.file} has {size} bytes here, its writer wrote {wrote}",
                rule="driver and workers must see the same folder",
                remedy="put the run's folder on storage that all nodes share",
            )
        )
