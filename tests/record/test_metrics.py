"""metrics.jsonl holds every step once, in order, through crashes and resumes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.errors import DataError
from nereus.record.metrics import METRICS_FILE, MetricsLog, read_records, scalars, truncate_records
from nereus.record.step import from_json, to_json
from tests.record.records import make_record


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


@given(
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    stats=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    memory=st.dictionaries(st.text(max_size=5), st.integers(0, 2**40), max_size=3),
)
def test_a_record_survives_json(
    reward: float | None, stats: dict[str, float], memory: dict[str, int]
) -> None:
    record = make_record(3, reward_mean=reward, stats=stats, memory_bytes=memory)
    line = to_json(record)
    assert "\n" not in line
    assert from_json(line) == record


def test_nan_becomes_null_in_the_file_and_nan_again_when_read() -> None:
    line = to_json(make_record(0, stats={"loss/actor": math.nan, "kl": math.inf}))
    assert json.loads(line)["stats"] == {"loss/actor": None, "kl": None}
    assert math.isnan(from_json(line).stats["loss/actor"])


def test_steps_are_appended_and_flushed_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append(make_record(0))
        assert steps_in(tmp_path) == [0]
        log.append(make_record(1))
        assert steps_in(tmp_path) == [0, 1]
    assert read_records(tmp_path / METRICS_FILE) == [make_record(0), make_record(1)]
    assert list((tmp_path / "tensorboard").iterdir())


def test_resume_drops_the_records_at_or_beyond_its_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(5):
            log.append(make_record(step))
    with MetricsLog(tmp_path, first_step=3) as log:
        assert [record.step for record in log.records] == [0, 1, 2]
        log.append(make_record(3, reward_mean=9.0))
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    assert read_records(tmp_path / METRICS_FILE)[-1].reward_mean == 9.0


def test_a_step_is_never_recorded_twice(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append(make_record(4))
        with pytest.raises(DataError, match="a step is recorded once"):
            log.append(make_record(4))
        with pytest.raises(DataError, match="step 3"):
            log.append(make_record(3))
    assert steps_in(tmp_path) == [4]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    whole = to_json(make_record(0)) + "\n"
    path.write_text(whole + to_json(make_record(1))[:40])
    assert [record.step for record in read_records(path)] == [0]
    truncate_records(path, 9)
    assert path.read_text() == whole


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text(to_json(make_record(0)) + "\n{broken\n" + to_json(make_record(1)) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_records(path)


def test_a_record_of_another_version_is_refused_by_name() -> None:
    values = json.loads(to_json(make_record(0)))
    with pytest.raises(DataError, match="surprise"):
        from_json(json.dumps({**values, "surprise": 1}))


def test_missing_rewards_have_no_scalar() -> None:
    tags = dict(scalars(make_record(0, reward_mean=None, num_missing_rewards=8)))
    assert "reward/mean" not in tags
    assert tags["reward/missing"] == 8


def test_tensorboard_shows_a_resumed_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path) as log:
        for step in range(4):
            log.append(make_record(step))
    time.sleep(1.0)  # files are told apart by the second, then by a number whose digits are compared as text
    with MetricsLog(tmp_path, first_step=2) as log:
        log.append(make_record(2, reward_mean=7.0))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    rewards = [(event.step, event.value) for event in board.Scalars("reward/mean")]
    assert rewards == [(0, 0.5), (1, 1.5), (2, 7.0)]
