"""The environment variables that Nereus reads; nothing else in the package reads any."""

from __future__ import annotations

import os
from pathlib import Path


def environment_folder() -> Path:
    """Where Nereus keeps what outlives a run (calibration priors): `$NEREUS_HOME`, else `~/.nereus`."""
    return Path(os.environ.get("NEREUS_HOME", "~/.nereus")).expanduser()
