"""The logical state of a job: all that is true of it besides tensors, held once and committed with an epoch.

Step, policy version, sample cursor, learning rates, Adam steps, loss scale and random counters lie in one
record (`Control`, the checkpoint's own). It is the same on all workers because it is in none of them: it
travels inside the decision of a transition. Randomness is keyed by (seed, stream, step, sample id), so no
generator moves with a layout.

A change of layout keeps the rows of a step: dp * micro_batch_rows * accumulation stays equal (or, where dp
does not divide the rows, units take shares that differ by one row), so the optimizer sees the same batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise

from nereus.emu.checkpoint.control import Control
from nereus.errors import InvalidOperation, explain

Rows = tuple[int, int]  # [lo, hi) within the rows of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How the `num_rows` rows of one optimizer step are dealt to `dp` units and to micro-batches.

    Every unit runs `accumulation` micro-batches of at most `micro_batch_rows` rows; they are collective over
    the units, so their number is one for all.
    """

    num_rows: int
    dp: int
    micro_batch_rows: int
    accumulation: int

    @classmethod
    def choose(cls, *, num_rows: int, dp: int, most_rows: int) -> BatchShape:
        """The fewest micro-batches of at most `most_rows` rows (what memory allows), of even sizes.

        Where dp divides the rows, the number that makes dp * micro_batch_rows * accumulation equal `num_rows`
        exactly is taken, unless it is more than twice the fewest. Raises InvalidOperation when a unit would
        get no row.
        """
        if not (1 <= dp <= num_rows and most_rows >= 1):
            raise InvalidOperation(
                explain(
                    "cannot deal the rows of a step",
                    values=f"num_rows={num_rows} dp={dp} most_rows={most_rows}",
                    rule="every unit needs at least one row and room for one",
                    remedy="use fewer units or more rows a step",
                )
            )
        share = -(-num_rows // dp)
        accumulation = -(-share // most_rows)
        # A divisor of the share keeps the product exact; it is worth up to twice the micro-batches.
        exact = next((a for a in range(accumulation, 2 * accumulation + 1) if share % a == 0), accumulation)
        accumulation = exact if num_rows % dp == 0 else accumulation
        return cls(
            num_rows=num_rows,
            dp=dp,
            micro_batch_rows=-(-share // accumulation),
            accumulation=accumulation,
        )

    def unit_rows(self, unit: int) -> Rows:
        """The rows of one unit; the first `num_rows mod dp` units have one more."""
        base, extra = divmod(self.num_rows, self.dp)
        lo = unit * base + min(unit, extra)
        return lo, lo + base + (unit < extra)

    def micro_batches(self, unit: int) -> tuple[Rows, ...]:
        """The rows of each micro-batch of one unit, `accumulation` of them; a late one may be empty."""
        lo, hi = self.unit_rows(unit)
        base, extra = divmod(hi - lo, self.accumulation)
        starts = [lo + i * base + min(i, extra) for i in range(self.accumulation + 1)]
        return tuple(pairwise(starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalState:
    """The control record and the shape of a model's batch."""

    control: Control
    batch: BatchShape

    def with_dp(self, dp: int, *, most_rows: int) -> LogicalState:
        """The same state under another number of units: only the batch's shape changes."""
        batch = BatchShape.choose(num_rows=self.batch.num_rows, dp=dp, most_rows=most_rows)
        return LogicalState(control=self.control, batch=batch)

    def to_json(self) -> str:
        """One JSON object, for `Decision.control`."""
        return json.dumps({"control": json.loads(self.control.to_json()), "batch": asdict(self.batch)})

    @classmethod
    def from_json(cls, text: str) -> LogicalState:
        """The inverse of `to_json`."""
        raw = json.loads(text)
        return cls(control=Control.from_json(json.dumps(raw["control"])), batch=BatchShape(**raw["batch"]))
