"""The oracle of a replay: its plans come from a path that was computed with the whole trace known."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Admits whatever its path proposes (`nereus.planner.clairvoyant`). No job can be given it."""

    @property
    def name(self) -> str:
        """As in tables."""
        return "oracle"

    @property
    def looks_ahead(self) -> bool:
        """The step that comes is all that it looks at."""
        return False

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Before every step."""
        return True

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit."""
        why = "the clairvoyant path turns here"
        return verdict(change, history, policy=self.name, admit=True, why=why)
