"""Which engines can run here, how they would run, and what keeps an absent one away."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

from nereus.cli.check import Check, Verdict

MEGATRON_FROM, MEGATRON_BELOW = "0.16.1", "0.17"
PACKAGES = {
    "vllm": ("vllm", "generation"),
    "megatron": ("megatron-core", "training"),
    "deepspeed": ("deepspeed", "training"),
}


def check_engines(*, cuda: str | None) -> list[Check]:
    """The built-in engine and the optional ones; `cuda` is the version that torch was built for, if any."""
    checks = [Check(subject="engine torch", found="built in: generation and training")]
    for engine, (package, use) in PACKAGES.items():
        found = installed(package)
        if found is None:
            checks.append(_absent(engine))
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


def _absent(engine: str) -> Check:
    return Check(
        subject=f"engine {engine}",
        found="absent",
        verdict=Verdict.note,
        remedy=f"only if you want it: pip install 'nereus-rl[{engine}]'",
    )
