"""Any gain: before every step, the plan whose step is shortest, whatever the move costs (as DynaRL does)."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyGain:
    """Moves for any gain at all."""

    @property
    def name(self) -> str:
        """As in the configuration."""
        return "any_gain"

    @property
    def looks_ahead(self) -> bool:
        """The step that comes is all that it looks at."""
        return False

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Before every step."""
        return True

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit what is shorter."""
        admit = change.gain_s > 0
        why = f"a step becomes {change.gain_s:.3g} s shorter" if admit else "a step would not become shorter"
        return verdict(change, history, policy=self.name, admit=admit, why=why)
