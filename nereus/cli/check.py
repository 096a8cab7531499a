"""One finding about the machine: what was looked at, what was found, how bad it is, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a finding bears on running campaigns."""

    ok = "ok"
    note = "note"
    """Something optional is absent."""
    warning = "warning"
    """It runs, but slowly, in part, or not for long."""
    failure = "failure"
    """Not even a campaign on logical GPUs runs here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A line of `nereus doctor`."""

    subject: str
    found: str
    verdict: Verdict = Verdict.ok
    remedy: str = ""


def can_run(checks: list[Check]) -> bool:
    """Whether the embedded default (logical GPUs, own Ray, own Prefect server) can run."""
    return all(check.verdict != Verdict.failure for check in checks)
