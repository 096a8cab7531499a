"""Checks of what is installed: Python, the packages Nereus requires, engines, NCCL, the Prefect server."""

from __future__ import annotations

import re
import sqlite3
import sys
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from nereus.cli.check import Check, Verdict
from nereus.cli.check_engines import check_engines
from nereus.config.environment import prefect_api_url

DISTRIBUTION = "nereus-rl"
SHOWN = ("torch", "ray", "prefect", "transformers")  # the others are named only when something is wrong
MIN_SQLITE = (3, 24, 0)  # Prefect's server needs upserts
SERVER_TIMEOUT_S = 3.0


def check_software() -> list[Check]:
    """Everything that needs no look at the hardware."""
    return [
        check_python(sys.version_info[:3]),
        *check_packages(),
        *check_engines(cuda=torch_cuda()),
        check_sqlite(),
        check_server(),
    ]


def check_python(found: tuple[int, ...]) -> Check:
    """Python is new enough."""
    text = ".".join(map(str, found))
    if found >= (3, 11):
        return Check(subject="python", found=text)
    return Check(
        subject="python",
        found=text,
        verdict=Verdict.failure,
        remedy="make the environment with Python 3.11 or later",
    )


def check_packages() -> list[Check]:
    """The packages that Nereus requires are there and new enough."""
    try:
        required = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return [
            Check(
                subject=DISTRIBUTION,
                found="not installed",
                verdict=Verdict.failure,
                remedy="run `make venv`, or `pip install -e .` in the repository",
            )
        ]
    checks = [
        check_requirement(entry) for entry in required if entry.marker is None or entry.marker.evaluate()
    ]
    return [check for check in checks if check.verdict != Verdict.ok or check.subject in SHOWN]


def check_requirement(required: Requirement) -> Check:
    """One required package."""
    remedy = f'pip install "{required}"'
    try:
        found = version(required.name)
    except PackageNotFoundError:
        return Check(subject=required.name, found="absent", verdict=Verdict.failure, remedy=remedy)
    if not required.specifier.contains(found, prereleases=True):
        text = f"{found}, but {required.specifier} is needed"
        return Check(subject=required.name, found=text, verdict=Verdict.failure, remedy=remedy)
    return Check(subject=required.name, found=found)


def torch_cuda() -> str | None:
    """The CUDA or ROCm version that the installed torch was built for; None for a CPU build or no torch.

    Read from torch's version file, because importing torch takes seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^(?:cuda|hip)\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return found.group(1) if found else None


def check_nccl(*, num_gpus: int) -> Check:
    """NCCL comes with torch's GPU builds; without GPUs gloo does its work."""
    names = ((entry.metadata["Name"], entry.version) for entry in distributions())
    found = next(
        (f"{name} {text}" for name, text in names if str(name).startswith(("nvidia-nccl", "rccl"))), None
    )
    if found:
        return Check(subject="nccl", found=found)
    if num_gpus == 0:
        return Check(subject="nccl", found="absent; gloo is used on CPU")
    return Check(
        subject="nccl",
        found="absent",
        verdict=Verdict.warning,
        remedy="install torch's GPU build, which brings it",
    )


def check_sqlite() -> Check:
    """The embedded Prefect server's database."""
    found = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info >= MIN_SQLITE:
        return Check(subject="sqlite", found=found)
    needed = ".".join(map(str, MIN_SQLITE))
    return Check(
        subject="sqlite",
        found=f"{found}, but {needed} is needed",
        verdict=Verdict.failure,
        remedy="use a newer Python build, or set PREFECT_API_URL to a running server",
    )


def check_server() -> Check:
    """Where runs are tracked; a server that was chosen must answer."""
    url = prefect_api_url()
    if url is None:
        return Check(subject="prefect server", found="embedded, in each run's folder")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=SERVER_TIMEOUT_S):
            return Check(subject="prefect server", found=url)
    except (urllib.error.URLError, ValueError, TimeoutError) as error:
        return Check(
            subject="prefect server",
            found=f"{url} does not answer ({error})",
            verdict=Verdict.warning,
            remedy="start it with `prefect server start`, or unset PREFECT_API_URL for the embedded one",
        )
