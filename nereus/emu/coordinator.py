"""The driver's side of a transition: from votes to the one decision, and what may be asked for at all.

votes = collect(...)  ─▶  decide: commit if every worker voted yes  ─▶  require_commit
a dead coordinator's successor  ─▶  recover: abort, unless the epoch was decided before
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nereus.emu.ballot import Vote
from nereus.emu.decision import Decision, DecisionRecord, Outcome
from nereus.emu.layout import Rank
from nereus.emu.rank_plan import RankPlan
from nereus.errors import InvalidOperation, TransitionAborted, explain


@dataclass(eq=False)
class Coordinator:
    """The driver's side: turns votes into the one decision."""

    record: DecisionRecord

    def decide(
        self, epoch: int, workers: Iterable[Rank], votes: Mapping[Rank, Vote], control: str = ""
    ) -> Decision:
        """Commit if every worker voted yes, abort otherwise; returns the decision that stands."""
        objections = [vote.reason for vote in votes.values() if not vote.yes]
        objections += [f"worker {worker} has not voted" for worker in workers if worker not in votes]
        outcome = Outcome.ABORT if objections else Outcome.COMMIT
        return self.record.decide(
            Decision(
                epoch=epoch,
                outcome=outcome,
                reason="; ".join(objections),
                control="" if objections else control,
            )
        )

    def abort(self, epoch: int, reason: str) -> Decision:
        """Abort without asking for votes, unless it was decided before; returns the decision that stands."""
        return self.record.decide(Decision(epoch=epoch, outcome=Outcome.ABORT, reason=reason))

    def recover(self, epoch: int) -> Decision:
        """Settle an epoch whose coordinator died: abort, unless it was decided before."""
        return self.abort(epoch, "the coordinator ended before it decided")


def check_bounded(plans: Mapping[Rank, RankPlan]) -> None:
    """Raise InvalidOperation unless some unit of a bounded plan is kept as it is, to be the backup.

    The plan's own check wants a second replica; here it must be one that the move leaves alone, since all
    others free their storage while they move.
    """
    bounded = [plan for plan in plans.values() if plan.mode == "bounded"]
    if bounded and not any(plan.old is not None and plan.old == plan.new for plan in bounded):
        olds = sorted({str(plan.old) for plan in bounded if plan.old is not None})
        raise InvalidOperation(
            explain(
                "cannot run a bounded transition",
                values=f"old units: {', '.join(olds)}; none is kept",
                rule="bounded mode frees old storage while it moves, so one replica must stay untouched",
                remedy="change one replica after the other, or use shadow mode",
            )
        )


def require_commit(decision: Decision) -> Decision:
    """The decision, or TransitionAborted with its reason: the old layout still holds."""
    if not decision.commits:
        raise TransitionAborted(
            explain(
                f"transition {decision.epoch} did not happen",
                values=decision.reason,
                rule="I6: the old layout holds",
                remedy="plan again with the workers that live, or allow more time",
            )
        )
    return decision
