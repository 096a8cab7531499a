"""Admission: whether a proposed change of plan is carried out, with all the numbers of the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

from nereus.planner.signals import SignalHistory
from nereus.planner.triggers import Trigger

_LAST_SWITCHES = 8  # transitions whose measured over predicted time corrects the next prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedChange:
    """Another plan, what it gains and what the way there costs.

    `old_step_s` is the plan in force, None where it cannot run; both steps are averages over the outlook of a
    policy that looks ahead, else those with the signals of now. `predicted_s` the transition by the cost
    model, `hidden_s` the seconds of it, corrected by those measured, in which nothing stands still that would
    have worked. `steps_to_change` are the steps until the pool is known to change, None: unknown.
    """

    step: int
    trigger: Trigger
    old: str
    new: str
    old_step_s: float | None
    new_step_s: float
    predicted_s: float
    hidden_s: float = 0.0
    steps_to_change: float | None = None

    @property
    def is_forced(self) -> bool:
        """Whether staying is not possible."""
        return self.old_step_s is None or self.trigger.cause.forces

    @property
    def gain_s(self) -> float:
        """Seconds that every step becomes shorter; 0 where the old plan cannot run."""
        return 0.0 if self.old_step_s is None else self.old_step_s - self.new_step_s

    def transition_s(self, history: SignalHistory) -> float:
        """What the transition will cost the job: the prediction, corrected, without what is hidden."""
        return max(0.0, self.predicted_s * slowdown(history) - self.hidden_s)


def slowdown(history: SignalHistory) -> float:
    """The median ratio of measured to predicted seconds of the last transitions; 1 before the first."""
    ratios = [
        switch.measured_s / switch.predicted_s
        for switch in history.switches[-_LAST_SWITCHES:]
        if switch.predicted_s > 0
    ]
    return median(ratios) if ratios else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict on a change, why, and every number that it rests on."""

    admit: bool
    why: str
    numbers: Mapping[str, float]
    policy: str
    change: ProposedChange

    def to_json(self) -> dict[str, Any]:
        """The decision as plain JSON values."""
        change = asdict(self.change)
        change["trigger"]["cause"] = str(self.change.trigger.cause)
        return {
            "admit": self.admit,
            "why": self.why,
            "policy": self.policy,
            "numbers": dict(self.numbers),
            "change": change,
        }


class AdmissionPolicy(Protocol):
    """Judges proposed changes. A value without state of its own: what it remembers is in the history."""

    @property
    def name(self) -> str:
        """Its name in configuration, records and tables."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether plans are compared over the lengths that are expected until the next crossing."""
        ...

    def asks(self, step: int, history: SignalHistory) -> bool:
        """Whether to plan again before this step though no signal triggered."""
        ...

    def decide(self, change: ProposedChange, history: SignalHistory) -> Decision:
        """Admit or refuse. Forced changes never reach a policy (`judge`)."""
        ...


def verdict(
    change: ProposedChange,
    history: SignalHistory,
    *,
    policy: str,
    admit: bool,
    why: str,
    numbers: Mapping[str, float] | None = None,
) -> Decision:
    """A decision with the numbers that every one records, and those of its policy."""
    known = {
        "gain_s": change.gain_s,
        "new_step_s": change.new_step_s,
        "transition_s": change.transition_s(history),
        "predicted_transition_s": change.predicted_s,
        "measured_transitions": float(len(history.switches)),
    }
    if change.old_step_s is not None:
        known["old_step_s"] = change.old_step_s
    if change.hidden_s > 0:
        known["hidden_s"] = change.hidden_s
    if change.steps_to_change is not None:
        known["steps_to_known_change"] = change.steps_to_change
    return Decision(admit=admit, why=why, numbers=known | dict(numbers or {}), policy=policy, change=change)


def judge(policy: AdmissionPolicy, change: ProposedChange, history: SignalHistory) -> Decision:
    """The policy's decision, or the admission of a change without which the job cannot go on."""
    if change.is_forced:
        why = f"forced by {change.trigger.cause}: {change.trigger.text}; profit is waived"
        return verdict(change, history, policy=policy.name, admit=True, why=why)
    return policy.decide(change, history)
