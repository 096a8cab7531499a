"""Rows that wait for a slot of the cache, first come first, and the responses that are whole."""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.emu.batch import PromptBatch, join_rows
from nereus.emu.engines.torch.transcript import Finished

PATIENCE = 8  # tokens of every row before who brought no rows is asked for some again


class Waiting:
    """The queue that the sets of rows of one unit share; the same on all of its ranks.

    Rows are numbered in the order in which they come. While the queue is open more may come. Who brings none
    has none yet: the rows that run then go on for a while.
    """

    def __init__(self) -> None:
        self._prompts: PromptBatch | None = None
        self._first = 0  # the number of the first row that waits
        self._finished: list[Finished] = []
        self.is_open = True
        self.is_wanted = False
        self._patience = 0

    def __len__(self) -> int:
        return 0 if self._prompts is None else self._prompts.num_rows

    def add(self, prompts: PromptBatch, *, more: bool) -> None:
        """Rows that come; `more` says whether others will."""
        self.is_open, self.is_wanted = more, False
        self._patience = 0 if prompts.num_rows else PATIENCE
        if prompts.num_rows:
            self._prompts = prompts if self._prompts is None else join_rows([self._prompts, prompts])

    def may_go_on(self) -> bool:
        """Whether a set of rows takes another step before rows are asked for; counts the step."""
        self._patience -= 1
        return self._patience >= 0

    def take(self, num: int) -> tuple[Tensor, PromptBatch]:
        """The next `num` rows with their numbers."""
        prompts = self._prompts
        assert prompts is not None, "nothing waits"
        taken = prompts.select(torch.arange(num))
        rest = torch.arange(num, prompts.num_rows)
        rows_n = self._first + torch.arange(num)
        self._prompts, self._first = prompts.select(rest) if len(rest) else None, self._first + num
        return rows_n, taken

    def finish(self, finished: Finished) -> None:
        """Hand over whole responses."""
        self._finished.append(finished)

    def take_finished(self) -> list[Finished]:
        """All that was handed over since this was last asked."""
        taken, self._finished = self._finished, []
        return taken
