"""The environment of reward processes: everything but secrets."""

from __future__ import annotations

from collections.abc import Mapping

SECRET_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names don't look like a secret's.

    A reward runs text of a model through somebody's code; neither needs the job's credentials.
    """
    return {
        name: value
        for name, value in environment.items()
        if not any(part in name.upper() for part in SECRET_PARTS)
    }
