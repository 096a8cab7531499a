"""The payback rule: move when the transition pays for itself within a share of the expected horizon.

admit  <=>  dL > 0  and  L_tran <= gamma * H * dL

dL is what a step gains, H the expected steps until the signal that triggered crosses its threshold again.
Until enough crossings were seen there is no H; then ski rental decides: stay until staying has cost as much
as moving would, which costs at most twice the clairvoyant's choice (Karlin et al., Algorithmica 3, 1988).
What is known of the future, an announced arrival or a drain deadline, bounds H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.planner.admission import Decision, ProposedChange, verdict
from nereus.planner.signals import SignalHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Payback:
    """See the module; `smoothing` is the newest interval's weight in the moving average."""

    gamma: float
    smoothing: float
    min_crossings: int

    @property
    def name(self) -> str:
        """As in the configuration."""
        return "payback"

    @property
    def looks_ahead(self) -> bool:
        """A move has to pay off over what comes until the next one."""
        return True

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Only triggers start a planning."""
        return False

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit what pays for itself."""
        admit, why, numbers = self._weigh(change, history)
        return verdict(change, history, policy=self.name, admit=admit, why=why, numbers=numbers)

    def _weigh(self, change: ProposedChange, history: SignalHistory) -> tuple[bool, str, dict[str, float]]:
        gain, cost = change.gain_s, change.transition_s(history)
        numbers = {"gamma": self.gamma}
        if gain <= 0:
            return False, "a step would not become shorter", numbers
        known = change.steps_to_change
        if known is not None and cost > known * gain:
            worth = f"the {known:.1f} steps until the pool changes gain {known * gain:.3g} s"
            return False, f"{worth}, moving costs {cost:.3g} s", numbers
        crossings = history.crossings.get(change.trigger.cause, ())
        numbers["crossings"] = float(len(crossings))
        if len(crossings) < self.min_crossings:
            numbers["waited_s"] = history.waited_s
            lost = history.waited_s + gain
            said = f"with the next step staying has cost {lost:.3g} s, moving costs {cost:.3g} s"
            return lost >= cost, f"{said} ({len(crossings)} crossings so far)", numbers
        expected = moving_average(history.intervals(change.trigger.cause), self.smoothing)
        lasted = change.step - crossings[-1]
        # Long-lived states live longer: one that outlived the average is expected to last as long again.
        horizon = max(expected, float(lasted))
        horizon = horizon if known is None else min(horizon, known)
        budget = self.gamma * horizon * gain
        numbers |= {"horizon_steps": horizon, "average_interval_steps": expected, "budget_s": budget}
        side = "within" if cost <= budget else "beyond"
        said = f"{self.gamma:g} x {horizon:.3g} steps x {gain:.3g} s = {budget:.3g} s"
        why = f"moving costs {cost:.3g} s, {side} {said}"
        return cost <= budget, why, numbers


def moving_average(values: Sequence[float], weight: float) -> float:
    """Exponential moving average that starts at the first value."""
    average = float(values[0])
    for value in values[1:]:
        average += weight * (value - average)
    return average
