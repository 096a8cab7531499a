"""What the workers of a transition are told, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nereus.emu.layout import Rank
from nereus.emu.rank_plan import RankPlan
from nereus.emu.tensor import ModelSpec
from nereus.emu.unit import Unit


class Phase(StrEnum):
    """Where a worker is in a transition; reported to the participant's observer."""

    BEGUN = "begun"
    SPILLED = "spilled"
    ALLOCATED = "allocated"
    MOVED = "moved"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One model-stage's part of a transition for one worker: which state becomes which, by which plan.

    `source` and `target` are equal for a change of layout; they differ where one model-stage is filled from
    another. Without a target of its own, the worker then only serves. `model` is how the target is stored,
    `stored` how the source is, where that differs.
    """

    source: str
    target: str
    model: ModelSpec
    plan: RankPlan
    stored: ModelSpec | None = None

    @property
    def changes_target(self) -> bool:
        """Whether this worker's shard of the target is another one afterwards, or none, or confirmed."""
        return self.source == self.target or self.plan.new is not None


@dataclass(frozen=True, kw_only=True)
class SpillOrder:
    """A worker's shard of `unit`, stored as `model` says, goes to host memory until the decision.

    The transition must end the unit: nothing brings the shard back after a commit.
    """

    source: str
    model: ModelSpec
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A state that a bounded move broke off in the middle, or that did not come back from the host: its unit
    must be destroyed and extended anew.
    """

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What acting on a decision came to: states that were lost, bytes that bounded moves sent by target."""

    lost: tuple[Lost, ...] = ()
    sent_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one worker did for one operation; `reason` says why it could not, and is empty when it could.

    `sent_bytes` went to peers, `spilled_bytes` to this host's memory.
    """

    worker: Rank
    epoch: int
    reason: str = ""
    sent_bytes: int = 0
    spilled_bytes: int = 0
    seconds: float = 0.0
