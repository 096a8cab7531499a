"""Saved calibrations come back as priors that weigh less with time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nereus.errors import ConfigError
from nereus.planner.calibrate import Calibrator
from nereus.planner.calibration_store import System, load, save

SYSTEM = System(hardware="H100 nvlink4", engine="vllm/0.24", model="meta-llama/Llama-3.1-8B")
DAY_S = 86400.0


def learned() -> Calibrator:
    calibrator = Calibrator()
    for _ in range(10):
        calibrator = calibrator.observed("gemm", [1.0] * 5, [1.3] * 5)
        calibrator = calibrator.with_generation((1.0, 0.1, 0.001), 1.7)
        calibrator = calibrator.with_training((1.0, 0.1, 0.01, 0.01), 1.4)
    return replace(calibrator, correction=0.25)


def test_values_come_back_and_weigh_less(tmp_path: Path) -> None:
    before = learned()
    save(tmp_path, SYSTEM, before, now_s=0.0)
    after = load(tmp_path, SYSTEM, now_s=0.0)
    assert after.calibration == before.calibration
    assert after.gains["gemm"].weight == pytest.approx(before.gains["gemm"].weight / 2)
    assert after.generation.rows == ()


def test_prior_fades_with_age(tmp_path: Path) -> None:
    save(tmp_path, SYSTEM, learned(), now_s=0.0)
    weights = [load(tmp_path, SYSTEM, now_s=days * DAY_S).gains["gemm"].weight for days in (0, 30, 60)]
    assert weights[1] == pytest.approx(weights[0] / 2)
    assert weights[2] == pytest.approx(weights[0] / 4)
    pulls = [load(tmp_path, SYSTEM, now_s=days * DAY_S).generation.prior_weight for days in (0, 30, 3000)]
    assert pulls[0] > pulls[1] > pulls[2] > 0


def test_new_system_starts_fresh(tmp_path: Path) -> None:
    assert load(tmp_path, SYSTEM) == Calibrator()


def test_systems_do_not_share_a_file(tmp_path: Path) -> None:
    other = System(hardware="H100 nvlink4", engine="torch", model="meta-llama/Llama-3.1-8B")
    save(tmp_path, SYSTEM, learned())
    assert load(tmp_path, other) == Calibrator()
    assert SYSTEM.file_name != other.file_name
    assert "/" not in SYSTEM.file_name


def test_saving_twice_keeps_one_file(tmp_path: Path) -> None:
    save(tmp_path, SYSTEM, Calibrator())
    save(tmp_path, SYSTEM, learned())
    assert [path.name for path in tmp_path.iterdir()] == [SYSTEM.file_name]


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1]"])
def test_damaged_file_is_an_error_that_names_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / SYSTEM.file_name).write_text(text)
    with pytest.raises(ConfigError, match="delete the file"):
        load(tmp_path, SYSTEM)
