"""After an aborted transition: how long the same plan is not tried again.

abort ─▶ 1 boundary left out ─▶ abort ─▶ 2 left out ─▶ abort ─▶ 4 ...     a changed pool, or another plan:
at once
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """A plan whose transition was aborted `num_aborts` times in a row, on the GPUs of `pool`.

    It is not tried before the boundary of `retry_step`.
    """

    plan: Hashable
    pool: Hashable
    num_aborts: int
    retry_step: int

    def is_about(self, plan: Hashable, pool: Hashable) -> bool:
        """Whether it speaks of this plan on this pool."""
        return (self.plan, self.pool) == (plan, pool)

    def holds_back(self, plan: Hashable, pool: Hashable, step: int) -> bool:
        """Whether this plan must not be tried before `step`."""
        return self.is_about(plan, pool) and step < self.retry_step


def after_abort(
    earlier: BackOff | None, plan: Hashable, pool: Hashable, *, step: int, longest: int
) -> BackOff:
    """Once more a transition to `plan`, before `step`, was aborted: leave out 1, 2, 4, ... boundaries.

    At most `longest` are left out; 0 tries again at the next one.
    """
    num_before = earlier.num_aborts if earlier is not None and earlier.is_about(plan, pool) else 0
    left_out = min(2**num_before, longest)
    return BackOff(plan=plan, pool=pool, num_aborts=num_before + 1, retry_step=step + 1 + left_out)
