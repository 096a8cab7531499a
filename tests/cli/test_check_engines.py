"""doctor says which engines run here and why one does not."""

from __future__ import annotations

import pytest

from nereus.cli import check_engines
from nereus.cli.check import Verdict
from nereus.cli.check_engines import check_deepspeed, check_megatron, check_vllm


def test_every_engine_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engines, "installed", lambda package: None)
    checks = check_engines.check_engines(cuda=None)
    assert [check.subject for check in checks] == [
        "engine torch",
        "engine vllm",
        "engine megatron",
        "engine deepspeed",
    ]
    assert all("nereus-rl[" in check.remedy for check in checks[1:])


@pytest.mark.parametrize("found", ["0.15.0", "0.17.0", "0.19.2"])
def test_a_megatron_of_another_version_is_a_warning_that_names_the_right_one(found: str) -> None:
    check = check_megatron(found, cuda="13.0", transformer_engine=True)
    assert check.verdict is Verdict.warning
    assert found in check.found
    assert "megatron-core>=0.16.1,<0.17" in check.remedy


@pytest.mark.parametrize(
    ("cuda", "fused", "how"),
    [(None, True, "on the CPU"), ("13.0", True, "Transformer Engine"), ("13.0", False, "is absent")],
)
def test_a_fitting_megatron_says_how_it_would_train(cuda: str | None, fused: bool, how: str) -> None:
    check = check_megatron("0.16.1", cuda=cuda, transformer_engine=fused)
    assert check.verdict is Verdict.ok
    assert how in check.found


@pytest.mark.parametrize(
    ("gpu", "cpu", "cuda", "misfits", "why"),
    [
        ("0.33.0", "0.32.0", "13.0", (), "overwrite each other"),
        ("0.30.0", None, "13.0", (), "0.32 or later"),
        ("0.33.0", None, None, (), "no CUDA"),
        (None, "0.32.0", "13.0", (), "CPUs only"),
        (None, "0.32.0", None, ("torchvision",), "beside torchvision"),
    ],
)
def test_a_vllm_that_cannot_run_here_says_why(
    gpu: str | None, cpu: str | None, cuda: str | None, misfits: tuple[str, ...], why: str
) -> None:
    check = check_vllm(gpu, cpu, cuda=cuda, misfits=misfits)
    assert check.verdict is Verdict.warning
    assert why in check.found + check.remedy
    assert check.remedy


@pytest.mark.parametrize(
    ("gpu", "cpu", "cuda", "how"),
    [("0.33.0", None, "13.0", "on GPUs"), (None, "0.32.0", None, "on the CPU")],
)
def test_a_fitting_vllm_says_how_it_would_generate(
    gpu: str | None, cpu: str | None, cuda: str | None, how: str
) -> None:
    check = check_vllm(gpu, cpu, cuda=cuda, misfits=())
    assert check.verdict is Verdict.ok
    assert how in check.found


def test_deepspeed_says_where_it_would_train_and_that_it_has_no_pipeline() -> None:
    assert "on the CPU" in check_deepspeed("0.19.8", cuda=None).found
    assert "no pipeline" in check_deepspeed("0.20.0", cuda="13.0").found
    old = check_deepspeed("0.18.1", cuda=None)
    assert old.verdict is Verdict.warning
    assert "deepspeed>=0.19.8" in old.remedy
