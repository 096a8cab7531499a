"""When a running job plans again, and which plans it moves to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nereus.config.frozen import BY_KIND, Frozen


class PaybackPolicy(Frozen):
    """Move when the transition pays for itself before the next drift is due."""

    kind: Literal["payback"] = "payback"
    gamma: float = Field(default=0.5, gt=0, le=1)
    """Share of the expected horizon within which the transition must have paid for itself."""
    smoothing: float = Field(default=0.3, gt=0, le=1)
    """Weight of the newest interval in the moving average of steps between threshold crossings."""
    min_crossings: int = Field(default=5, ge=2)
    """Crossings of a signal before its average is trusted. Until then the job waits until staying has cost
    as much as moving would.
    """


class EveryNPolicy(Frozen):
    """Plan again every few steps and move to whatever is best then."""

    kind: Literal["every_n"] = "every_n"
    steps: int = Field(default=3, ge=1)
    """Steps between two plans."""


class AnyGainPolicy(Frozen):
    """Plan again before every step and move whenever a step becomes shorter, whatever the move costs."""

    kind: Literal["any_gain"] = "any_gain"


class VerlGatePolicy(Frozen):
    """Move when one step gains more than the mean of the last measured switches took."""

    kind: Literal["verl_gate"] = "verl_gate"
    window: int = Field(default=3, ge=1)
    """How many of the last switches the mean is taken over."""


class NeverPolicy(Frozen):
    """Stay on the plan until GPUs or memory force a move."""

    kind: Literal["never"] = "never"


Policy = Annotated[PaybackPolicy | EveryNPolicy | AnyGainPolicy | VerlGatePolicy | NeverPolicy, BY_KIND]


class Thresholds(Frozen):
    """How far a signal may drift from where it was at the last planning, as a share of that value."""

    length: float = Field(default=0.3, gt=0)
    """Mean or 95th percentile of the response lengths."""
    efficiency: float = Field(default=0.2, gt=0)
    """Predicted over measured seconds, by stage."""
    memory: float = Field(default=0.2, gt=0)
    """Peak memory of the fullest GPU."""
    hysteresis: float = Field(default=0.2, ge=0, lt=1)
    """A signal beyond its threshold counts as back only when it is this share of the threshold inside it."""
    steps: int = Field(default=2, ge=1)
    """Steps that a signal must stay beyond its threshold, so that one odd step starts nothing."""
    headroom: float = Field(default=0.1, ge=0)
    """Share by which the next responses may be longer than the last: a plan that would then not fit the
    memory is left at once, and none is taken that would not.
    """


class AdaptationConfig(Frozen):
    """How a job follows the drift of its load, its GPUs and their speed."""

    policy: Policy = PaybackPolicy()
    """Which proposed changes are admitted."""
    thresholds: Thresholds = Thresholds()
    """Which drift makes the job plan again."""
    fixed: tuple[str, ...] = ()
    """Choices that the planner does not have, e.g. `actor.training.tp=2` or `actor.training.avoid=tp4pp2`;
    `nereus plan --fix` reads the same.
    """
    drain_margin_s: float = Field(default=30.0, ge=0)
    """Seconds before a drain deadline by which the job must have left the GPU."""


class TransitionsConfig(Frozen):
    """What a job does about transitions that fail."""

    longest_wait: int = Field(default=8, ge=0)
    """Steps that a plan is left out at most after its transition was aborted: 1 after the first abort, then
    twice as many each time. A change of the GPUs ends the wait.
    """
