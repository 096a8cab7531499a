"""Never: the plan stays until GPUs or memory force a move."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Never:
    """Refuses whatever is not forced."""

    @property
    def name(self) -> str:
        """As in the configuration."""
        return "never"

    @property
    def looks_ahead(self) -> bool:
        """The step that comes is all that it looks at."""
        return False

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Not at all."""
        return False

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Refuse."""
        why = f"the policy never moves by choice; a step would gain {change.gain_s:.3g} s"
        return verdict(change, history, policy=self.name, admit=False, why=why)
