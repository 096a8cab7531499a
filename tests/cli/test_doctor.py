"""doctor fails only where not even logical GPUs can run, and each finding says what to do."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nereus.cli import check_software, doctor
from nereus.cli.app import main
from nereus.cli.check import Check, Verdict, can_run
from nereus.cli.check_machine import (
    GIB,
    Gpu,
    check_cores,
    check_disk,
    check_gpus,
    check_memory,
    check_memory_reads,
    check_open_files,
    check_shared_memory,
    find_gpus,
)
from nereus.cli.check_software import check_nccl, check_python, check_requirement, check_server

H200 = Gpu(name="H200", total_bytes=140 * GIB, free_bytes=139 * GIB)


def test_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for subject in (
        "python",
        "torch",
        "ray",
        "prefect",
        "gpus",
        "nccl",
        "engine vllm",
        "memory",
        "disk for runs",
    ):
        assert subject in out


def test_a_failure_ends_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Check(subject="ray", found="absent", verdict=Verdict.failure, remedy="pip install ray")]
    monkeypatch.setattr(doctor, "check_software", lambda: broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "pip install ray" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (check_python((3, 10, 4)), Verdict.failure),
        (check_python((3, 12, 0)), Verdict.ok),
        (check_requirement(Requirement("torch>=99")), Verdict.failure),
        (check_requirement(Requirement("no-such-package-here>=1")), Verdict.failure),
        (check_requirement(Requirement("torch>=2.0")), Verdict.ok),
        (check_gpus([], torch_build=None), Verdict.note),
        (check_gpus([H200], torch_build="13.0"), Verdict.ok),
        (check_gpus([H200], torch_build=None), Verdict.warning),
        (check_gpus([Gpu(name="H200", total_bytes=GIB, free_bytes=0)], torch_build="13.0"), Verdict.warning),
        (check_cores(1), Verdict.warning),
        (check_cores(2), Verdict.ok),
        (check_memory(2 * GIB), Verdict.warning),
        (check_memory(8 * GIB), Verdict.ok),
        (check_shared_memory(64 * 2**20), Verdict.warning),
        (check_open_files(1024), Verdict.warning),
        (check_open_files(resource.RLIM_INFINITY), Verdict.ok),
    ],
)
def test_verdicts(check: Check, verdict: Verdict) -> None:
    assert check.verdict == verdict
    assert bool(check.remedy) == (verdict != Verdict.ok)


def test_only_failures_keep_campaigns_from_running() -> None:
    def checks(*verdicts: Verdict) -> list[Check]:
        return [Check(subject="a", found="b", verdict=verdict) for verdict in verdicts]

    assert can_run(checks(Verdict.ok, Verdict.note, Verdict.warning))
    assert not can_run(checks(Verdict.ok, Verdict.failure))


def test_a_folder_that_is_not_there_yet_is_checked_where_it_will_be(tmp_path: Path) -> None:
    assert "free at" in check_disk("disk for runs", tmp_path / "not" / "yet").found


def test_nccl_matters_only_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_software, "distributions", lambda: iter(()))
    assert check_nccl(num_gpus=0).verdict == Verdict.ok
    assert check_nccl(num_gpus=8).verdict == Verdict.warning


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", "not a url"])
def test_a_server_that_does_not_answer_is_a_warning(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    check = check_server()
    assert check.verdict == Verdict.warning
    assert "prefect server start" in check.remedy


def test_gpus_are_found_or_none() -> None:
    found: Sequence[Gpu] = find_gpus()
    assert all(gpu.total_bytes >= gpu.free_bytes for gpu in found)


@pytest.mark.parametrize(
    ("text", "verdict"), [("0", Verdict.ok), ("1", Verdict.ok), ("2", Verdict.note), ("3", Verdict.note)]
)
def test_a_kernel_that_denies_reads_between_workers_is_noted(
    tmp_path: Path, text: str, verdict: Verdict
) -> None:
    scope = tmp_path / "ptrace_scope"
    scope.write_text(text + "\n")
    assert check_memory_reads(scope).verdict == verdict
    assert check_memory_reads(tmp_path / "absent").verdict == Verdict.ok
