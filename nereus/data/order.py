"""The order in which prompts are used: a pure function of seed and epoch, and a position in it.

The order belongs to the data, not to the layout. A step takes the next prompts of one global order and deals
them to however many units there are, so changing their number never moves, drops or repeats a prompt, and a
checkpoint needs to remember two integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far the data was used: `position` prompts of `epoch` are taken. Counted in prompts, never in
    batches.
    """

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """The order of `num_prompts` prompts in every epoch; shuffled anew in each, or as they lie in the
    source.
    """

    num_prompts: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"an order needs at least one prompt, not {self.num_prompts}")

    def epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Indices into the source in the order of this epoch; int64 [num_prompts], each index once."""
        if not self.shuffle:
            return np.arange(self.num_prompts, dtype=np.int64)
        return _shuffled(self.seed, epoch, self.num_prompts)

    def take(self, cursor: Cursor, num_prompts: int) -> tuple[tuple[int, ...], Cursor]:
        """The sample ids of the next prompts, and the cursor after them.

        A sample id is epoch * size + index, so it names the pass as well as the prompt and is never met
        twice. A batch may run over an epoch's end into the next: every epoch is used in full. A cursor at an
        epoch's end and one at the next epoch's start mean the same.
        """
        if not 0 <= cursor.position <= self.num_prompts or cursor.epoch < 0:
            raise ValueError(f"{cursor} does not lie in an order of {self.num_prompts} prompts")
        epoch, position = cursor.epoch, cursor.position
        taken: list[int] = []
        while len(taken) < num_prompts:
            if position == self.num_prompts:
                epoch, position = epoch + 1, 0
            end = min(self.num_prompts, position + num_prompts - len(taken))
            taken += (epoch * self.num_prompts + self.epoch(epoch)[position:end]).tolist()
            position = end
        if position == self.num_prompts:
            epoch, position = epoch + 1, 0
        return tuple(taken), Cursor(epoch=epoch, position=position)

    def index_of(self, sample_id: int) -> int:
        """The index into the source of a sample id."""
        return sample_id % self.num_prompts


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """A permutation from the raw stream of Philox keyed by (seed, epoch).

    Sorting raw words, and not `Generator.permutation`: numpy keeps bit streams stable between versions but
    not what generators make of them, and a resumed job must see the same order. Ties (2^-64 a pair) fall to
    the lower index.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(size)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def deal(items: Sequence[T], num_units: int) -> tuple[tuple[T, ...], ...]:
    """Cut a batch into one contiguous share for each unit, sizes differing by at most one; joined, they are
    the batch.

    With fewer items than units some shares are empty.
    """
    if num_units < 1:
        raise ValueError(f"cannot deal {len(items)} items to {num_units} units")
    edges = [len(items) * unit // num_units for unit in range(num_units + 1)]
    return tuple(tuple(items[a:b]) for a, b in pairwise(edges))
