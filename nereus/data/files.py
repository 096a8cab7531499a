"""Records from prompt files: JSONL, parquet, and folders of either as Hugging Face datasets lays them out.

Every record of every file is yielded, in the order of file names and lines, or an error names the line
that cannot be used. Nothing is skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereus.errors import DataError, explain

JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of a source as it lies there; `where` names it in messages."""

    where: str
    values: Mapping[str, object]


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, or of a folder's files in the order of their names.

    A folder is searched in this order, and the first pattern that matches anything wins:
    `data/train-*.parquet`, `train-*.parquet`, `train/*.parquet`, `train.parquet`, `train.jsonl`,
    `*.parquet`, `*.jsonl`.

    Raises DataError for a path that is absent, of another type, lacks a shard, or holds a line that is no
    JSON object.
    """
    for file in find_files(path):
        if file.suffix in JSONL:
            yield from _read_jsonl(file)
        else:
            yield from _read_parquet(file)


def find_files(path: Path) -> tuple[Path, ...]:
    """The files that `path` stands for, complete sets of shards only."""
    if path.is_file():
        if path.suffix not in JSONL + PARQUET:
            raise DataError(
                explain(
                    "cannot read prompts",
                    values=str(path),
                    rule=f"the name must end in one of {', '.join(JSONL + PARQUET)}",
                    remedy="convert the file, e.g. with pandas: DataFrame.to_parquet or to_json(lines=True)",
                )
            )
        return (path,)
    if not path.is_dir():
        raise DataError(
            explain(
                "cannot read prompts",
                values=f"{path} does not exist (working folder {Path.cwd()})",
                remedy="give a .jsonl or .parquet file, or a folder of them",
            )
        )
    for pattern in (
        "data/train-*.parquet",
        "train-*.parquet",
        "train/*.parquet",
        "train.parquet",
        "train.jsonl",
        "*.parquet",
        "*.jsonl",
    ):
        if found := tuple(sorted(path.glob(pattern))):
            _require_all_shards(found)
            return found
    seen = sorted(entry.name for entry in path.iterdir())[:10]
    raise DataError(
        explain(
            "cannot find prompts in a folder",
            values=f"{path} holds {seen}",
            rule="it needs train-*.parquet (also under data/), *.parquet or *.jsonl",
            remedy="give one file, or the subfolder of one configuration or split",
        )
    )


def _require_all_shards(files: tuple[Path, ...]) -> None:
    """Refuse a set of `name-00000-of-00004` files that lacks one: its prompts would be lost unseen."""
    present: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := SHARD.match(file.stem):
            key = (match["stem"], int(match["total"]))
            present.setdefault(key, set()).add(int(match["number"]))
    for (stem, total), numbers in present.items():
        if missing := sorted(set(range(total)) - numbers):
            raise DataError(
                explain(
                    "cannot read an incomplete set of shards",
                    values=f"{files[0].parent}/{stem}-*-of-{total:05d} lacks {missing[:10]}",
                    remedy="fetch the missing files again, or give the single files that you mean",
                )
            )


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DataError(
                    explain(
                        f"cannot read {where}",
                        values=f"{error}; it begins with {line[:60]!r}",
                        rule="every line must be one JSON object in UTF-8",
                        remedy="correct the line; nothing is skipped",
                    )
                ) from error
            if not isinstance(values, dict):
                raise DataError(
                    explain(
                        f"cannot read {where}",
                        values=f"it holds a {type(values).__name__}",
                        rule="every line must be one JSON object",
                        remedy='write each prompt as {"prompt": ..., "answer": ...} on a line of its own',
                    )
                )
            yield Record(where=where, values=values)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            explain(
                f"cannot read {path}",
                values=str(error),
                rule="it must be a parquet file",
                remedy="a file of about 130 bytes is often a Git LFS pointer: fetch the real one",
            )
        ) from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield Record(where=f"{path} row {number}", values=values)
