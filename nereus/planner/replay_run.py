"""What a replay records: one row a step, one run a policy, and the sums that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.planner.admission import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step. `step_s` is the step itself; `transition_s`, `redone_s` and `stalled_s` come on top.

    `redone_s` is work that was lost with a GPU or to a lack of memory and done again; `stalled_s` is time
    without a plan that fits. `plan` is empty while stalled.
    """

    step: int
    step_s: float
    transition_s: float
    redone_s: float
    stalled_s: float
    num_gpus: int
    used_gpus: int
    length_mean: float
    compute: float
    network: float
    plan: str
    decisions: tuple[Decision, ...] = ()
    num_transitions: int = 0
    num_restarts: int = 0

    @property
    def total_s(self) -> float:
        """All seconds that this step of the trace took."""
        return self.step_s + self.transition_s + self.redone_s + self.stalled_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy over one trace."""

    policy: str
    trace: str
    rows: tuple[StepRow, ...]

    @property
    def total_s(self) -> float:
        """Seconds from start to end."""
        return sum(row.total_s for row in self.rows)

    @property
    def num_steps(self) -> int:
        """Steps that were done; a stalled one was not."""
        return sum(row.step_s > 0 for row in self.rows)

    @property
    def mean_step_s(self) -> float:
        """Seconds for each step done, transitions and lost work included."""
        return self.total_s / max(self.num_steps, 1)

    @property
    def num_transitions(self) -> int:
        """Changes of plan that were carried out, restarts included."""
        return sum(row.num_transitions for row in self.rows)

    @property
    def num_restarts(self) -> int:
        """Changes whose state came from a checkpoint."""
        return sum(row.num_restarts for row in self.rows)

    @property
    def transition_s(self) -> float:
        """Seconds of all transitions, restarts included."""
        return sum(row.transition_s for row in self.rows)

    @property
    def transition_share(self) -> float:
        """Share of the time that went into transitions."""
        return self.transition_s / self.total_s

    @property
    def redone_s(self) -> float:
        """Seconds of work that was lost and done again."""
        return sum(row.redone_s for row in self.rows)

    @property
    def stalled_s(self) -> float:
        """Seconds without a plan that fits."""
        return sum(row.stalled_s for row in self.rows)

    @property
    def num_decisions(self) -> int:
        """Proposed changes that were decided on."""
        return sum(len(row.decisions) for row in self.rows)
