"""Every few steps the best plan of that moment, without weighing what the move costs."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryN:
    """Plans again `steps` steps after the last planning, and not when a signal drifts."""

    steps: int

    @property
    def name(self) -> str:
        """With its number of steps."""
        return f"every_{self.steps}"

    @property
    def looks_ahead(self) -> bool:
        """The step that comes is all that it looks at."""
        return False

    def asks(self, step: int, history: SignalHistory) -> bool:
        """When the time has come."""
        return step % self.steps == 0

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit what is shorter, at its times only."""
        due = change.step % self.steps == 0
        why = f"step {change.step} is {'' if due else 'not '}a multiple of {self.steps}"
        if change.gain_s <= 0:
            why += "; a step would not become shorter"
        return verdict(change, history, policy=self.name, admit=due and change.gain_s > 0, why=why)
