"""Which groups of a step teach, and how many prompts that uses up: DAPO's dynamic sampling. Pure.

batch 1: ✓ ✗ ✓ ✗    batch 2: ✗ ✓ ✓ ✓      wanted 4: the last ✓ is not needed,
         used up ────────────── ┘  └ given back    the prompts after the fourth ✓ are drawn again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nereus.algorithms.dapo import has_spread
from nereus.emu.batch import Rollouts, join_rows
from nereus.tasks.score import Rewards


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Rows of responses, `samples` to each prompt in the prompts' order, and their rewards."""

    rollouts: Rollouts
    rewards: Rewards

    def select(self, rows: Tensor) -> Answered:
        """These rows; why rewards are missing, and how long they waited, stays told of all."""
        rewards = replace(self.rewards, values_b=self.rewards.values_b[rows])
        return Answered(rollouts=self.rollouts.select(rows), rewards=rewards)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """`taught` holds the groups to learn from, `used` all groups up to the last one of them.

    Prompts beyond `num_used` are given back: they count as never drawn. So every prompt is learnt from once
    or found without spread once, whatever stops in between.
    """

    taught: Answered
    used: Answered
    num_taught: int
    num_used: int


def keep_groups(batches: Sequence[Answered], *, samples: int, wanted: int) -> Kept:
    """The first `wanted` groups with unequal rewards; all prompts are used up where there are fewer."""
    missing: Counter[str] = Counter()
    for batch in batches:
        missing.update(batch.rewards.missing)
    whole = Answered(
        rollouts=join_rows([batch.rollouts for batch in batches]),
        rewards=Rewards(
            values_b=torch.cat([batch.rewards.values_b for batch in batches]),
            missing={reason: missing[reason] for batch in batches for reason in batch.rewards.missing},
            queue_s=tuple(one_s for batch in batches for one_s in batch.rewards.queue_s),
        ),
    )
    num_rows = whole.rollouts.batch.num_rows
    assert num_rows % samples == 0, f"{num_rows} rows are not groups of {samples}"
    group_b = torch.arange(num_rows) // samples
    teaching = torch.nonzero(has_spread(whole.rewards.values_b, group_b)[::samples])[:, 0][:wanted]
    num_used = int(teaching[-1]) + 1 if len(teaching) == wanted else num_rows // samples
    return Kept(
        taught=whole.select(torch.nonzero(torch.isin(group_b, teaching))[:, 0]),
        used=whole.select(torch.arange(num_used * samples)),
        num_taught=len(teaching),
        num_used=num_used,
    )
