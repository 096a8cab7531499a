"""The environment variables that Nereus reads; nothing else in the package reads any."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path


def environment_folder() -> Path:
    """Where Nereus keeps what outlives a run (calibration priors): `$NEREUS_HOME`, else `~/.nereus`."""
    return Path(os.environ.get("NEREUS_HOME", "~/.nereus")).expanduser()


def prefect_api_url() -> str | None:
    """The Prefect server that the user chose: `$PREFECT_API_URL`, or the one of the active Prefect profile.

    None means that no server was chosen. Read without importing Prefect, whose settings are fixed by then.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    if not path.is_file():
        return None
    profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None


def secret(name: str) -> str | None:
    """The value of a variable that the user named as the place of a key. Never logged, never written."""
    return os.environ.get(name)


def set_defaults(values: Mapping[str, str]) -> None:
    """Put `values` into this process's environment where the user has set nothing."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def reads_memory() -> bool:
    """Whether CPU workers on one host may read one another's memory; `NEREUS_READ_MEMORY=0` says no."""
    return os.environ.get("NEREUS_READ_MEMORY", "1") != "0"


def gives_back_gpu_memory() -> bool:
    """Whether shards on GPUs lie in memory whose parts can be given back, for bounded moves; off unless
    `NEREUS_GPU_PAGES=1`.
    """
    return os.environ.get("NEREUS_GPU_PAGES", "0") == "1"


def workers_per_gpu() -> int:
    """How many workers share a GPU: 1, or `NEREUS_WORKERS_PER_GPU`, which is for tests (NCCL 2.30)."""
    return max(1, int(os.environ.get("NEREUS_WORKERS_PER_GPU", "1")))


def uses_m2n() -> bool:
    """Whether weights go from training to other GPUs' generation by `nccl.m2n`; off unless `NEREUS_M2N=1`."""
    return os.environ.get("NEREUS_M2N", "0") == "1"


def is_completing() -> bool:
    """Whether the shell asks for completions of a command line that is being typed."""
    return "_NEREUS_COMPLETE" in os.environ
