"""The usual practice, as a baseline: layouts stay as at the start, the number of units follows the GPUs.

Its tp and pp are fixed in the request it plans for; this policy only says when: as soon as the pool changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory
from nereus.planner.triggers import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class DpScaling:
    """Scales at once when GPUs come or go, and for no other reason."""

    name: str = "fixed"

    @property
    def looks_ahead(self) -> bool:
        """The step that comes is all that it looks at."""
        return False

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Only triggers start a planning."""
        return False

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit a gain from more GPUs."""
        admit = change.trigger.cause is Cause.POOL and change.gain_s > 0
        why = f"{change.trigger.cause}: a step would gain {change.gain_s:.3g} s"
        return verdict(change, history, policy=self.name, admit=admit, why=why)
