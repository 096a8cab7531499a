"""Prompt files: every record in order, or an error that names the line, what it holds, the rule and the
remedy.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from nereus.data.files import find_files, read_records
from nereus.errors import DataError


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(path: Path) -> list[object]:
    return [record.values for record in read_records(path)]


def test_jsonl_gives_every_line_in_order_and_names_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"é{i}"} for i in range(5)])
    path.write_text(path.read_text() + "\n  \n" + '{"prompt": "last"}')  # blank lines, no final newline
    records = list(read_records(path))
    assert [record.values["prompt"] for record in records] == ["é0", "é1", "é2", "é3", "é4", "last"]
    assert [record.where for record in records][-2:] == [f"{path} line 5", f"{path} line 8"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (b'{"prompt": "x"', ["line 2", '{\\"prompt\\"', "JSON object", "nothing is skipped"]),
        (b'["x"]', ["line 2", "list", "JSON object"]),
        (b'{"prompt": "\xff"}', ["line 2", "utf-8", "UTF-8"]),
    ],
)
def test_a_bad_line_is_an_error_with_number_value_rule_and_remedy(
    tmp_path: Path, line: bytes, names: list[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        values(path)
    for name in names:
        assert name.replace("\\", "") in str(caught.value).replace("\\", "")


def test_parquet_keeps_nested_columns_and_row_order_over_batches(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": [{"role": "user", "content": str(i)}], "n": i} for i in range(2500)
    ]
    path = parquet(tmp_path / "a.parquet", rows)
    assert values(path) == rows
    assert next(iter(read_records(path))).where == f"{path} row 1"


def test_a_file_that_is_not_parquet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match=r"must be a parquet file.*LFS"):
        values(path)


@pytest.mark.parametrize(
    "layout",
    [
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["train/0.parquet", "train/1.parquet"],
        ["part-a.parquet", "part-b.parquet"],
    ],
)
def test_hugging_face_layouts_are_read_in_the_order_of_their_shards(
    tmp_path: Path, layout: list[str]
) -> None:
    for number, name in reversed(list(enumerate(layout))):
        parquet(tmp_path / name, [{"prompt": f"{number}-{i}"} for i in range(3)])
    if layout[0].startswith(("data/", "train-")):  # another split beside it is not training data
        parquet(tmp_path / layout[0].replace("train", "test").replace("00002", "00001"), [{"prompt": "test"}])
    assert values(tmp_path) == [{"prompt": f"{number}-{i}"} for number in range(2) for i in range(3)]


def test_a_missing_shard_is_an_error_and_not_a_smaller_data_set(tmp_path: Path) -> None:
    for number in (0, 2):
        parquet(tmp_path / f"data/train-{number:05d}-of-00004.parquet", [{"prompt": "x"}])
    with pytest.raises(DataError, match=r"lacks \[1, 3\]"):
        find_files(tmp_path)


def test_a_folder_of_jsonl_prefers_the_training_split(tmp_path: Path) -> None:
    jsonl(tmp_path / "test.jsonl", [{"prompt": "test"}])
    jsonl(tmp_path / "train.jsonl", [{"prompt": "train"}])
    assert values(tmp_path) == [{"prompt": "train"}]


def test_paths_that_hold_no_prompts_are_errors_that_say_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes.txt"):
        find_files(tmp_path)
    with pytest.raises(DataError, match=r"must end in one of .jsonl"):
        find_files(tmp_path / "notes.txt")
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "absent")
