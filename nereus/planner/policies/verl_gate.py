"""A gate by the mean of the last measured switches: one step must gain more than such a switch takes.

Nothing of the future enters it: the gain of a single step stands against the whole switch.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlGate:
    """`window` is how many switches the mean is over; before the first, the prediction stands for it."""

    window: int

    @property
    def name(self) -> str:
        """As in the configuration."""
        return "verl_gate"

    @property
    def looks_ahead(self) -> bool:
        """The step that comes is all that it looks at."""
        return False

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Before every step."""
        return True

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit what gains more in a step than the last switches took on average."""
        last = [switch.measured_s for switch in history.switches[-self.window :]]
        mean = fmean(last) if last else change.predicted_s
        admit = change.gain_s > mean
        whose = f"the mean of {len(last)} measured switches" if last else "the predicted switch"
        why = f"a step gains {change.gain_s:.3g} s, {whose} is {mean:.3g} s"
        return verdict(
            change, history, policy=self.name, admit=admit, why=why, numbers={"mean_switch_s": mean}
        )
